"""What every command works with: a model, a text, and policies with what these need to know."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Generic, TypeVar

from kvsearch.evaluation.anchored_tokens import require_anchors
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.options.budget import BudgetConfig, sized_for
from kvsearch.options.model import HeadLossConfig, ModelConfig
from kvsearch.options.other_commands import PolicyLike
from kvsearch.options.workload import DatasetConfig, MeasuredConfig, TextConfig
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, needs_heads
from kvsearch.session import channel_importance, head_losses, key_offsets, load
from kvsearch.session.learned import learns, with_learned
from kvsearch.session.policies import (
    begins_search,
    check_names,
    listed,
    resolve,
    resolve_some,
    values_of,
)
from kvsearch.session.progress import Shown
from kvsearch.workloads.text.windows import Tokens

C = TypeVar("C", bound=ModelConfig)


class Session(Generic[C]):
    """The model, text and policies of a command.

    A session is made before its model is loaded, which may take minutes: names of policies and
    texts that are wrong show at once.

    Args:
        config: of the command.
        policies: methods, files or `Policy` objects, where the command is about some.
        sized: whether methods can be sized; None: whether the config has a budget.

    Raises:
        KvsearchError: a policy or a text cannot be used.

    Attributes:
        config: as given.
        asked: the policies, as given.
        shown: progress and sentences.
    """

    def __init__(
        self,
        config: C,
        policies: PolicyLike | Sequence[PolicyLike] | None = None,
        *,
        sized: bool | None = None,
    ) -> None:
        self.config, self.shown = config, Shown(quiet=not config.progress)
        self.asked: tuple[PolicyLike, ...] = ()
        self._loaded: LoadedModel | None = None
        if policies is not None:
            self.asked = listed(policies)
            budget = isinstance(config, BudgetConfig) and config.sized
            check_names(self.asked, sized=budget if sized is None else sized)
        if isinstance(config, TextConfig):
            load.require_files(*config.texts)

    # -- model and text ------------------------------------------------------------------------

    def load(self, context: int) -> LoadedModel:
        """Load the model, which then runs over so many tokens; it is `loaded` from then on.

        Raises:
            TextError: its positions end before that.
            ModelError: it is none, cannot be loaded, or has another dtype or device already.
        """
        self._loaded = load.model(self.config, context=context, say=self.shown.say)
        return self._loaded

    @property
    def loaded(self) -> LoadedModel:
        """The model, once `load` was called."""
        assert self._loaded is not None, "`load` comes first"
        return self._loaded

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates on the model; its kernels are compiled side by side first."""
        load.kernels(self.loaded, self.shown.say)
        return Evaluator(self.loaded, batch=getattr(self.config, "batch", None))

    @cached_property
    def text(self) -> Tokens:
        """The text that the config names, or the built-in one.

        Raises:
            TextError: it has no tokens.
            ModelError: the model and its tokenizer do not fit.
        """
        assert isinstance(self.config, TextConfig), "the command reads a text"
        dataset = self.config.dataset if isinstance(self.config, DatasetConfig) else None
        config = self.config
        tasks = isinstance(config, MeasuredConfig) and not config.windowed
        found = load.source(config.text, dataset, self.shown.say, tasks=tasks)
        return load.tokenized(self.loaded, found)

    # -- policies ------------------------------------------------------------------------------

    def setting(self, tokens: int, prompt: int = 0, *, prompts: bool = False) -> Setting:
        """What policies are sized for: the model's shape and the budget, and lengths in tokens.

        Args:
            tokens: of a window, or of the longest prompt with its answer.
            prompt: how many of them come in one call.
            prompts: words for prompts in what is raised.

        Raises:
            TextError: so many tokens never fill the budget.
        """
        shape, config = self.loaded.shape, self.config
        budget = config.budget(shape) if isinstance(config, BudgetConfig) else None
        return sized_for(shape, budget, tokens, prompt, prompts)

    def measured(
        self, setting: Setting, text: Tokens | None = None, *, count: int = 1, length: int = 0
    ) -> Setting:
        """The setting with what the policies follow.

        That are the weights that rules have learned, what every KV head loses, and the importance
        of the model's channels.

        Args:
            setting: that policies are sized for.
            text: to measure channels on; None: policies that follow them are not asked for.
            count, length: windows of the text that are evaluated, and tokens of each. Channels
                are measured beside these, if the text goes on there.

        Raises:
            KvsearchError: a file of losses is wrong, or the model has none of what is measured.
        """
        if any(map(learns, self.asked)):
            setting = with_learned(setting, self.loaded)
        config = self.config if isinstance(self.config, HeadLossConfig) else HeadLossConfig()
        names = [str(p) for p in self.asked if needs_heads(values_of(p))]
        if names or config.heads is not None:
            found = head_losses.found(self.loaded, self.shown, config, of=", ".join(names))
            setting = replace(setting, heads=found)
        needed = any(key_offsets.needs_offset(values_of(p)) for p in self.asked)
        if needed or any(map(begins_search, self.asked)):
            means = key_offsets.found(self.loaded, self.shown)
            if needed or key_offsets.called_for(means, self.loaded):
                offset = means.offset(self.loaded.model, setting.tokens)
                setting = replace(setting, offset=offset)
        if text is not None:
            setting = channel_importance.with_importance(
                setting, self.asked, Evaluator(self.loaded), text,
                count=count, length=length, shown=self.shown,
            )  # fmt: skip
        return setting

    def policies(self, setting: Setting) -> list[Policy]:
        """The policies at this size, each with a name.

        Raises:
            KvsearchError: the model cannot run one of them, or the budget pays for nothing.
        """
        found = resolve(self.asked, setting)
        self._require_anchors(found)
        return found

    def some_policies(self, setting: Setting) -> tuple[list[Policy], dict[str, str]]:
        """As `policies`, without methods that model or budget refuse, and why, if any remains."""
        found, refused = resolve_some(self.asked, setting)
        self._require_anchors(found)
        return found, refused

    def _require_anchors(self, policies: Sequence[Policy]) -> None:
        for policy in policies:
            require_anchors(self.loaded, policy)
