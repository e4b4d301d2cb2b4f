"""The base of every value type that crosses a boundary: policies, rules, spaces, run options."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
