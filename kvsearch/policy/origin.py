"""What `about` says of where a policy comes from: true whatever becomes of policy and model."""

from kvsearch.policy.types import Policy

# `adapted` and `channels` are what `kvsearch adapt` and `prune` did to the model
KEPT = ("model", "adapted", "channels")


def without_figures(policy: Policy) -> Policy:
    """The policy without the figures in its `about`, which were measured on something else.

    Everything goes that is not known to speak of the origin: anybody may write figures there,
    under any name.
    """
    about = {name: policy.about[name] for name in KEPT if name in policy.about}
    return policy if about == policy.about else policy.model_copy(update={"about": about})
