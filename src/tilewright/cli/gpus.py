"""The options `--gpu` and `--price` of commands that compare GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tilewright.hardware import GPU

ALL = "all"
Gpus = Annotated[
    list[str],
    typer.Option("--gpu", metavar="NAME", help="GPU with a datasheet, or all. Repeatable: the fastest comes first."),
]
Prices = Annotated[
    list[str] | None,
    typer.Option("--price", metavar="NAME=PRICE", help="Price of a GPU per hour: the cheapest call comes first."),
]


def parse_gpus(names: Iterable[str]) -> list[GPU]:
    """Return the datasheets of the named GPUs, each once."""
    from tilewright import hardware

    words = [word.strip() for text in names for word in text.split(",")]
    chosen = hardware.DATASHEETS.values() if ALL in words else map(hardware.datasheet, words)
    return list({gpu.name: gpu for gpu in chosen}.values())


def parse_prices(texts: Sequence[str] | None, gpus: Sequence[GPU]) -> dict[str, float]:
    """Return the price per hour by GPU."""
    from tilewright import hardware

    prices = {}
    for text in (word for given in texts or () for word in given.split(",")):
        name, _, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            raise typer.BadParameter(f"--price: '{text}' is not a price; write it like h100=2.50.") from None
        gpu = hardware.datasheet(name.strip())
        if gpu not in gpus:
            raise typer.BadParameter(f"--price: {gpu.name} is not one of the compared GPUs; add --gpu {gpu.name}.")
        if not 0 < price < float("inf"):
            raise typer.BadParameter(f"--price: {number} is not a positive price.")
        prices[gpu.name] = price
    return prices


def price_of_calls(price: float | None, us: float | None) -> float | None:
    """Return the price of a million calls, from the price per hour and the time of a call."""
    return price * us / 3600 if price is not None and us is not None else None


def order(us: float | None, price: float | None) -> tuple[float, float]:
    """Return a sort key: the cheapest call, then the fastest, then calls without a time."""
    unknown = float("inf")
    cost = price_of_calls(price, us)
    return (unknown if cost is None else cost, unknown if us is None else us)


def price_fields(price: float | None, us: float | None) -> dict[str, Any]:
    """Return the fields of a JSON line; none without a price."""
    return {} if price is None else {"price_per_hour": price, "price_per_million_calls": price_of_calls(price, us)}


def price_cells(prices: Mapping[str, float], gpu: str, us: float | None) -> list[str]:
    """Return the cells of PRICE_COLUMNS; none if no GPU has a price."""
    if not prices:
        return []
    price = prices.get(gpu)
    calls = price_of_calls(price, us)
    return ["" if price is None else f"{price:.2f}", "" if calls is None else f"{calls:.3g}"]


PRICE_COLUMNS = ("price per hour", "per million calls")
