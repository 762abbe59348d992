"""The base of every kernel config: a frozen pydantic model that refuses what it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Tuning knobs of one kernel.

    Subclasses declare fields with constraints (`Field(gt=0, multiple_of=8)`); unknown fields and
    impossible values are refused when the model is built. Instances are immutable and hashable, so a
    config can be a static argument of a jitted function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NoConfig(Config):
    """The schema of an implementation that has nothing to tune."""
