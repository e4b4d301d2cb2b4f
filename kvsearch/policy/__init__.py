"""What a KV cache keeps, as one frozen value: the policy, its bytes and its schedule. No torch."""

from kvsearch.policy.anchors import Anchors
from kvsearch.policy.budgets import require_slots
from kvsearch.policy.channels import Channels
from kvsearch.policy.check import check
from kvsearch.policy.head_losses import HeadLosses
from kvsearch.policy.key_offset import Offset
from kvsearch.policy.ladder import Rungs, offset, rungs
from kvsearch.policy.layout import LayerLayout, Layout, layout
from kvsearch.policy.parts import Budgets, HeadTiers, Ladder, Quantizer, Tier
from kvsearch.policy.policy import Policy
from kvsearch.policy.shape import ModelShape

__all__ = [
    "Anchors",
    "Budgets",
    "Channels",
    "HeadLosses",
    "HeadTiers",
    "Ladder",
    "LayerLayout",
    "Layout",
    "ModelShape",
    "Offset",
    "Policy",
    "Quantizer",
    "Rungs",
    "Tier",
    "check",
    "layout",
    "offset",
    "require_slots",
    "rungs",
]
