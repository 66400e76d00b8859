"""Replace the forward functions of a model's modules, in this instance alone, and restore them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tilewright.models import linears, replacements
from tilewright.models.forward import Forward, is_foreign, is_replaced
from tilewright.models.optimizer import SwappedOptimizer
from tilewright.models.rebound import Rebound
from tilewright.models.replacements import Replacement

KINDS = tuple(sorted(info.name for info in pkgutil.iter_modules(replacements.__path__)))

SCRIPTED = "it is compiled by TorchScript, which leaves no forward function to replace"


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

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        skipped: list[Skipped],
        optimizer: SwappedOptimizer | None,
        quantized: list[linears.QuantizedLayer] | None = None,
    ):
        self.model = model
        self.quantized = quantized or []
        self.sites = sites
        self.skipped = skipped
        self._optimizer = optimizer

    def revert(self) -> None:
        """Restore the model and its optimizer exactly. A second call does nothing."""
        for site in self.sites:
            _restore(site)
        for layer in self.quantized:
            layer.revert()
        if self._optimizer is not None:
            self._optimizer.revert()

    @contextlib.contextmanager
    def without(self, *kinds: str) -> Iterator[None]:
        """Run the model's own forward functions of some kinds while the context is open: `without("head")` has logits.

        Without arguments, of all kinds. A module with sites of two kinds runs its own forward if one is named.
        """
        _require_kinds(kinds)
        with contextlib.ExitStack() as stack:
            for site in self.sites:
                if site.kind in (kinds or KINDS) and _is_active(site):
                    stack.callback(_resume, site, _is_on_top(site), site.forward.func, site.forward.keywords)
                    _restore(site)
            yield

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
        lines = [f"{len({site.module for site in self.sites})} modules replaced in {type(self.model).__name__}"]
        width = max(map(len, replaced), default=0)
        lines += [f"  {what:{width}}  {_shortened(names)}" for what, names in replaced.items()]
        lines += [linears.summary(self.quantized)] if self.quantized else []
        lines += [f"left alone, {what}: {_shortened(names)}" for what, names in left.items()]
        return "\n".join(lines)


def apply(
    model: nn.Module,
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
    state_bits: int = 32,
    linear: str | None = None,
) -> Patched:
    """Replace what our kernels compute faster in a model, and nothing outside this instance.

    `include` and `exclude` select kinds: activation, attention, head, mlp, norm, post_norm, residual, rope. A module is
    replaced only if a small stand-in of it computes the same values as our form. An AdamW `optimizer` becomes
    `tilewright.AdamW` in place, with its state, of which the moments take `state_bits` bits per element. `linear` names
    a format of `tilewright.quantize`, such as "int4-g128": the weights of linear layers are quantised, and the
    originals wait in host memory. Returns the changes, with `revert()`.
    """
    _require_model(model)
    for name, given in (("include", include), ("exclude", exclude)):
        if isinstance(given, str):
            raise TypeError(f"{name} takes a list of kinds: {name}=[{given!r}]")
    _require_kinds([*(include or ()), *exclude])
    if optimizer is not None:
        _require_parameters_of(model, optimizer)
    kinds = [kind for kind in KINDS if (include is None or kind in include) and kind not in exclude]
    quantized, left = ([], []) if linear is None else linears.quantize_linears(model, linear)
    with _as_usual():
        sites, skipped = _search(model, kinds)
    skipped += [Skipped(name, "linear", reason) for name, reason in left]
    swapped = None if optimizer is None else SwappedOptimizer(optimizer, state_bits)
    patched = Patched(model, sites, skipped, swapped, quantized)
    with contextlib.ExitStack() as undo:  # an interrupt, or a layer that does not fit, leaves nothing changed
        undo.callback(patched.revert)
        for layer in quantized:
            layer.install()
            made = Forward(linears.forward, layer.module)
            sites.append(Site(layer.name, layer.module, "linear", layer.weight.format, made, ()))
        for site in sites:
            vars(site.module)["forward"] = site.forward
        undo.pop_all()
    return patched


def revert(model: nn.Module) -> None:
    """Restore every forward function of a model that `apply` replaced: for a copy, which came without its `Patched`."""
    for name, module in model.named_modules():
        if linears.CHILD in module._modules:
            raise ValueError(
                f"{name or 'the model'} has a quantised weight, and a copy has no original: load the weights again, or "
                "call revert() on what apply() returned"
            )
    for module in model.modules():
        if is_replaced(module):
            del vars(module)["forward"]


@contextlib.contextmanager
def _as_usual() -> Iterator[None]:
    """Run stand-ins on the CPU and in float32, in whatever context the caller is, and leave its random state alone."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.set_default_dtype(torch.float32)
        try:
            with torch.inference_mode(False):
                yield
        finally:
            torch.set_default_dtype(dtype)


def _search(model: nn.Module, kinds: list[str]) -> tuple[list[Site], list[Skipped]]:
    sites: dict[nn.Module, list[Site]] = {}
    skipped: list[Skipped] = []
    covered: set[nn.Module] = set()
    finders = {kind: importlib.import_module(f"{replacements.__name__}.{kind}").find for kind in kinds}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            skipped += [] if module in covered else [Skipped(name, "every kind", SCRIPTED)]
            covered |= {*module.children()}
            continue
        for kind, find in finders.items():
            found = find(module) if module not in covered else None
            if found is None:
                continue
            reason = found if isinstance(found, str) else _obstacle(module)
            if isinstance(found, Replacement) and (reason is None or is_replaced(module)):
                covered |= {module.get_submodule(child) for child in found.covers}
            if isinstance(found, str) or reason is not None:
                skipped.append(Skipped(name, kind, str(reason)))
            elif module not in sites:
                fused = tuple(module.get_submodule(child) for child in found.fuses)
                sites[module] = [Site(name, module, kind, found.kernel, Forward(found.forward, module), fused)]
            else:
                ours = _joined(sites[module][0].forward, found.forward, module)
                if ours is not None:
                    there = [dataclasses.replace(site, forward=ours) for site in sites[module]]
                    sites[module] = [*there, Site(name, module, kind, found.kernel, ours, ())]
    return [site for found in sites.values() for site in found], skipped


def _joined(first: Forward, second: Any, module: nn.Module) -> Forward | None:
    """Return a forward function that has both replacements; None unless both replace globals."""
    function: Any = first.func
    if isinstance(function, Rebound) and isinstance(second, Rebound):
        return Forward(function | second, module)
    return None


def _obstacle(module: nn.Module) -> str | None:
    """Return why the forward function of a module may not be replaced."""
    if is_replaced(module):
        return "it is patched already"
    return "something else has replaced its forward function" if is_foreign(module) else None


def _is_on_top(site: Site) -> bool:
    """Return whether a call of the module calls ours, and not something that wraps it, as accelerate does."""
    return vars(site.module).get("forward") is site.forward


def _is_active(site: Site) -> bool:
    return "forward" in vars(site.module) and site.forward.func is not type(site.module).forward


def _restore(site: Site) -> None:
    if _is_on_top(site):
        del vars(site.module)["forward"]
    site.forward.point_to(type(site.module).forward, {})


def _resume(site: Site, is_on_top: bool, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    site.forward.point_to(function, options)
    if is_on_top:
        vars(site.module)["forward"] = site.forward


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"the model {SCRIPTED.removeprefix('it ')}")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "the model is on the meta device, or offloaded there: give it real weights first, with to_empty() or "
            "from_pretrained()"
        )
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the model has lazy modules without sizes: run it on a batch first")


def _require_parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has no parameter of this model: create it after the last change of parameters")


def _require_kinds(kinds: Collection[str]) -> None:
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"unknown kind {unknown[0]!r}: choose from {', '.join(KINDS)}")


def _shortened(names: list[str]) -> str:
    shown = ", ".join(name or "(model)" for name in names[:2])
    return shown if len(names) <= 2 else f"{shown}, … ({len(names)} modules)"
