"""Replace the forward functions of a model's modules, in this instance alone, and restore them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewright.models import replacements
from tilewright.models.optimizer import SwappedOptimizer

KINDS = tuple(sorted(info.name for info in pkgutil.iter_modules(replacements.__path__)))


class Forward(functools.partial):
    """A replacement bound to its module, with the signature of the original, which trainers and `generate` read."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self.args[0]).forward, self.args[0]))


@dataclass(frozen=True)
class Site:
    """A module whose forward function was replaced."""

    name: str
    module: nn.Module
    kind: str
    kernel: str
    forward: Forward
    fused: tuple[nn.Module, ...]  # children whose calls are part of the kernel


@dataclass(frozen=True)
class Skipped:
    """A module that could have been a site, and why it is none."""

    name: str
    kind: str
    reason: str


class Patched:
    """The changes made to a model. A context manager that reverts them on exit; printing it lists them."""

    def __init__(self, model: nn.Module, sites: list[Site], skipped: list[Skipped], optimizer: SwappedOptimizer | None):
        self.model = model
        self.sites = sites
        self.skipped = skipped
        self._optimizer = optimizer

    def revert(self) -> None:
        """Restore the model and its optimizer exactly. A second call does nothing."""
        for site in self.sites:
            _restore(site)
        if self._optimizer is not None:
            self._optimizer.revert()

    @contextlib.contextmanager
    def without(self, *kinds: str) -> Iterator[None]:
        """Run the model's own forward functions of some kinds while the context is open: `without("head")` has logits.

        Without arguments, of all kinds.
        """
        _require_kinds(kinds)
        paused = [site for site in self.sites if site.kind in (kinds or KINDS) and _is_active(site)]
        for site in paused:
            _restore(site)
        try:
            yield
        finally:
            for site in paused:
                vars(site.module)["forward"] = site.forward

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()

    def __str__(self) -> str:
        """Return one line per kernel and per reason, with the modules they apply to."""
        replaced: dict[str, list[str]] = {}
        for site in self.sites:
            replaced.setdefault(f"{site.kind}: {site.kernel}", []).append(site.name)
        left: dict[str, list[str]] = {}
        for skipped in self.skipped:
            left.setdefault(f"{skipped.kind}: {skipped.reason}", []).append(skipped.name)
        lines = [f"{len(self.sites)} modules replaced in {type(self.model).__name__}"]
        lines += [f"  {what:32} {_shortened(names)}" for what, names in replaced.items()]
        lines += [f"left alone, {what}: {_shortened(names)}" for what, names in left.items()]
        return "\n".join(lines)


def apply(
    model: nn.Module,
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Patched:
    """Replace what our kernels compute faster in a model, and nothing outside this instance.

    `include` and `exclude` select kinds: activation, head, mlp, norm, residual, rope. A module is replaced only if a
    small stand-in of it computes the same values as our form. An AdamW `optimizer` becomes `tilewright.AdamW` in place,
    with its state. Returns the changes, with `revert()`.
    """
    _require_model(model)
    _require_kinds([*(include or ()), *exclude])
    kinds = [kind for kind in KINDS if (include is None or kind in include) and kind not in exclude]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # where stand-ins run
        sites, skipped = _search(model, kinds)
    swapped = None if optimizer is None else SwappedOptimizer(optimizer)
    for site in sites:
        vars(site.module)["forward"] = site.forward
    return Patched(model, sites, skipped, swapped)


def _search(model: nn.Module, kinds: list[str]) -> tuple[list[Site], list[Skipped]]:
    sites: dict[nn.Module, Site] = {}
    skipped: list[Skipped] = []
    covered: set[nn.Module] = set()
    finders = {kind: importlib.import_module(f"{replacements.__name__}.{kind}").find for kind in kinds}
    for name, module in model.named_modules():
        for kind, find in finders.items():
            found = find(module) if module not in covered else None
            if found is None:
                continue
            found = found if isinstance(found, str) else _obstacle(module) or found
            if isinstance(found, str):
                skipped.append(Skipped(name, kind, found))
            elif module not in sites:
                fused = tuple(module.get_submodule(child) for child in found.fuses)
                sites[module] = Site(name, module, kind, found.kernel, Forward(found.forward, module), fused)
                covered |= {module.get_submodule(child) for child in found.covers}
    return [*sites.values()], skipped


def _obstacle(module: nn.Module) -> str | None:
    """Return why the forward function of a module may not be replaced."""
    own = vars(module).get("forward")
    is_own = isinstance(own, types.MethodType) and own.__func__ is type(module).forward
    return None if own is None or is_own else "something else has replaced its forward function"


def _is_active(site: Site) -> bool:
    return vars(site.module).get("forward") is site.forward


def _restore(site: Site) -> None:
    if _is_active(site):
        del vars(site.module)["forward"]


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply takes a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if is_replaced(module):
            raise ValueError(f"the model is already patched ({name or 'the model itself'}): call revert() first")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "the model is on the meta device: give it real weights first, with to_empty() or from_pretrained()"
        )


def is_replaced(module: nn.Module) -> bool:
    """Return whether this module has a replaced forward function."""
    return isinstance(vars(module).get("forward"), Forward)


def _require_kinds(kinds: Collection[str]) -> None:
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"unknown kind {unknown[0]!r}: choose from {', '.join(KINDS)}")


def _shortened(names: list[str]) -> str:
    shown = ", ".join(name or "(model)" for name in names[:2])
    return shown if len(names) <= 2 else f"{shown}, … ({len(names)} modules)"
