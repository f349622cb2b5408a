"""Elementwise maps from what a projection gives to the range that a declaration promises, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from linalg_dsl.language.spec import Interval

ROOT = 16.0
"""The temperature of gated linear attention: a gate is sigmoid(z)^(1/16), 0.96 at z = 0."""
_STEEPEST = 15.0


class Link(Protocol):
    """``value(z)`` is in range for every z; ``raw(value(z))`` is z."""

    def value(self, z: Tensor) -> Tensor: ...

    def raw(self, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Free:
    """No range: the number as it is."""

    def value(self, z: Tensor) -> Tensor:
        return z

    def raw(self, value: Tensor) -> Tensor:
        return value


FREE = Free()


@dataclass(frozen=True, slots=True)
class Between:
    """low + (high - low) sigmoid(z), off the bounds also where float32 would round to them."""

    low: float
    high: float

    def value(self, z: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(z.clamp(-_STEEPEST, _STEEPEST))

    def raw(self, value: Tensor) -> Tensor:
        return torch.logit((value - self.low) / (self.high - self.low))


@dataclass(frozen=True, slots=True)
class Above:
    """low + softplus(z)."""

    low: float

    def value(self, z: Tensor) -> Tensor:
        return self.low + F.softplus(z)

    def raw(self, value: Tensor) -> Tensor:
        return inverse_softplus(value - self.low)


@dataclass(frozen=True, slots=True)
class Below:
    """high - softplus(z)."""

    high: float

    def value(self, z: Tensor) -> Tensor:
        return self.high - F.softplus(z)

    def raw(self, value: Tensor) -> Tensor:
        return inverse_softplus(self.high - value)


@dataclass(frozen=True, slots=True)
class Root:
    """logsigmoid(z) / 16, the log gate of gated linear attention; ``linear`` gives its exponential."""

    linear: bool = False

    def value(self, z: Tensor) -> Tensor:
        log = F.logsigmoid(z) / ROOT
        return torch.exp(log) if self.linear else log

    def raw(self, value: Tensor) -> Tensor:
        log = torch.log(value) if self.linear else value
        return torch.logit(torch.exp(ROOT * log))


def inverse_softplus(value: Tensor) -> Tensor:
    """z with softplus(z) = value > 0."""
    return value + torch.log(-torch.expm1(-value))


def link_of(interval: Interval) -> Link:
    """The map into a range; bounds that belong to it are approached, never passed."""
    match interval.low, interval.high:
        case None, None:
            return FREE
        case float() | int() as low, float() | int() as high:
            return Between(float(low), float(high))
        case float() | int() as low, None:
            return Above(float(low))
        case _, high:
            assert high is not None
            return Below(float(high))
