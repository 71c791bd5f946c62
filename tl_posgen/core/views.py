"""What shows a result: functions of `tl_posgen.report`, which is imported when something is shown, as the registry
imports measures. Nothing else of core knows how results look."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

VIEWS = {  # name -> module:function
    "page": "tl_posgen.report.page:render_page",
    "page in a cell": "tl_posgen.report.page:Page",
    "report in a cell": "tl_posgen.report.page:cell_of_report",
    "result in a cell": "tl_posgen.report.page:cell_of_result",
    "one head": "tl_posgen.report.one_head:one_head_of",
    "token by token": "tl_posgen.report.circuits:titled",
    "figure in other words": "tl_posgen.report.figures:reworded",
    "map of heads": "tl_posgen.report.head_figures:head_map",
}


def view(name: str) -> Callable[..., Any]:
    """Return the function that shows this.

    Example:
        >>> view("map of heads").__name__
        'head_map'
    """
    return resolve_name(VIEWS[name])
