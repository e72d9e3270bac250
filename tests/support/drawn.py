"""The data that a chart of the page carries."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_memprof.report.charts.embed import Chart


def document(chart: Chart) -> Any:
    found = re.search(r'<script type="application/json">(.*?)</script>', chart.html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def models(node: Any) -> Iterator[dict[str, Any]]:
    """All models of bokeh's document."""
    if isinstance(node, dict):
        if node.get("type") == "object" and "name" in node:
            yield node
        for child in node.values():
            yield from models(child)
    elif isinstance(node, list):
        for child in node:
            yield from models(child)


def columns(chart: Chart, with_column: str) -> list[dict[str, list[Any]]]:
    """The data sources of a chart that have a column."""
    found = []
    for model in models(document(chart)):
        if model["name"] == "ColumnDataSource":
            entries = dict(model["attributes"]["data"]["entries"])
            if with_column in entries:
                found.append({name: values(written) for name, written in entries.items()})
    return found


def values(written: Any) -> list[Any]:
    if isinstance(written, list):
        return written
    data = base64.b64decode(written["array"]["data"])
    found: list[Any] = np.frombuffer(gzip.decompress(data), np.dtype(written["dtype"])).tolist()
    return found
