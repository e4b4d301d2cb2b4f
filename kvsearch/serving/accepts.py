"""What a server cannot run of a policy: it is the same for every server that batches requests."""

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy

LACKS = ("anchors", "refit")  # fields that are at their defaults in what a server runs
# that a rule may need, and attention layers of a server do not see
UNREAD = ("outputs", "hidden", "rereading")


def require_servable(policy: Policy) -> None:
    """Raise a `PolicyError` if a server cannot run `policy`."""
    if policy.anchors is not None:
        raise PolicyError(
            "field anchors: the attention layers of a server are not told which tokens they get; "
            "use a policy without anchors"
        )
    rule = policy.active_rule
    if policy.rereads and rule is not None:
        raise PolicyError(
            f"field rule: {rule.name!r} reads a prompt twice, and a server reads it once; take the "
            "policy that the run's report names as the best of those that read it once, or search "
            "with --target vllm"
        )
    if rule is not None and not rule.needs.isdisjoint(UNREAD):
        raise PolicyError(
            f"field rule: {rule.name!r} reads more than queries, keys and values, and the "
            "attention layers of a server see nothing else; use another rule"
        )
