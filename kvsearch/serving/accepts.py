"""What a server cannot run of a policy: it is the same for every server that batches requests."""

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy

LACKS = ("trigger", "anchors")  # fields that are at their defaults in what a server runs


def require_servable(policy: Policy) -> None:
    """Raise a `PolicyError` if a server cannot run `policy`."""
    if policy.anchors is not None:
        raise PolicyError(
            "field anchors: the attention layers of a server are not told which tokens they get; "
            "use a policy without anchors"
        )
    rule = policy.active_rule
    if rule is not None and "outputs" in rule.needs:
        raise PolicyError(
            f"field rule: {rule.name!r} reads the output projection, which the attention layers of "
            "a server do not have; use another rule"
        )
    if rule is not None and "hidden" in rule.needs:
        raise PolicyError(
            f"field rule: {rule.name!r} reads what goes into attention layers, and those of a "
            "server see queries, keys and values only; use another rule"
        )
    if policy.prompted:
        raise PolicyError(
            f"field trigger: {policy.trigger!r} compacts after the prompt, and a server brings a "
            "prompt in pieces, and again with what was generated when it preempts; use 'stream'"
        )
