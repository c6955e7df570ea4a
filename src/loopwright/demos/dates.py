"""Endless written dates and their ISO form: the demo of translation.

The names of days and months are spelled out here, since `calendar` follows the locale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from itertools import count, islice

from loopwright.demos.demo_data import DemoData, Row, is_held_out
from loopwright.keys import KeyStream

_FIRST, _LAST = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
_SHARE = 0.1
_NUM_ROWS = (20_000, 500)

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _month(day: date) -> str:
    return _MONTHS[day.month - 1]


def _ordinal(number: int) -> str:
    suffix = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


# No text of one form can be read as a text of another.
FORMS: tuple[Callable[[date], str], ...] = (
    lambda day: f"{day.day} {_month(day)} {day.year}",
    lambda day: f"{_month(day)} {day.day}, {day.year}",
    lambda day: f"{_DAYS[day.weekday()]}, {day.day} {_month(day)} {day.year}",
    lambda day: f"{_month(day)[:3]} {_ordinal(day.day)}, {day.year}",
    lambda day: f"the {_ordinal(day.day)} of {_month(day)} {day.year}",
    lambda day: f"{day.day:02}.{day.month:02}.{day.year}",
    lambda day: f"{day.month}/{day.day}/{day.year}",
    lambda day: f"{day.day}-{_month(day)[:3]}-{day.year}",
)


def written_dates(seed: int, is_validation: bool) -> Iterator[Row]:
    """Yield endless rows of `source`, a date in one of eight written forms, and `target`, its ISO form.

    Validation and training never share a day, whatever the seeds.
    """
    keys = KeyStream(seed, purpose="dates")
    for index in count():
        key = keys.at(index)
        day = date.fromordinal(_FIRST + key % (_LAST - _FIRST + 1))
        if is_held_out(day.isoformat(), _SHARE) == is_validation:
            yield {"source": FORMS[(key >> 40) % len(FORMS)](day), "target": day.isoformat()}


def date_demo() -> DemoData:
    train, validation = (
        list(islice(written_dates(0, is_validation), num_rows))
        for num_rows, is_validation in zip(_NUM_ROWS, (False, True), strict=True)
    )
    source, licence = "generated dates from 1900 to 2099", "none needed: generated"
    return DemoData("translation", train, validation, source, licence, "csv")
