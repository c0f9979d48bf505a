"""Counts, device hours and money as people read them."""

from __future__ import annotations


def format_count(number: float) -> str:
    """`3.5 M`, `124 M`, `512 k`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{number:,.0f}"


def device_noun(kind: str, count: int = 1) -> str:
    """Return `GPU` or `CPU rank`: the noun for a device in an inventory. A rank on a CPU has a share of its cores."""
    return ("GPU" if kind == "cuda" else "CPU rank") + ("" if count == 1 else "s")


def format_amount(number: float) -> str:
    """Return `0.61`, `1,234`: three significant digits, but all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_money(amount: float, currency: str) -> str:
    """Return `30.83 USD`; amounts below 0.1 have two significant digits, `0.0012 USD`."""
    return f"{amount:,.2f} {currency}" if amount >= 0.1 or not amount else f"{amount:.2g} {currency}"


def describe_utilisation(*, mfu: float | None, matmul_share: float | None, rate: str = "measured matmul rate") -> str:
    """Return the words that follow a speed, such as ", 41.0% MFU"; empty if no utilisation is known."""
    shares = ((mfu, "MFU"), (matmul_share, f"of the {rate}"))
    return "".join(f", {share:.1%} {words}" for share, words in shares if share is not None)
