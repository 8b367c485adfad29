"""``posttrain ui``: a read-only site over a store, on this machine, behind a key."""

import argparse
import hmac
import html
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.declare.store_root import asked_store
from flows.reports.wording import clock, counted, relative
from flows.serving.serve_model import bound_socket, serve_app
from lineage.artifact import DATA, MODELS, SOURCE, Kind
from lineage.errors import PipelineError
from lineage.markup import html_page

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from flows.reports.run import RunView
    from lineage.graph.index import Index
    from lineage.graph.places import Indexed

_PORT = 8765
_PAGE = 100  # rows
_REPORT = "report.html"  # of a data stage
_LOG_BYTES = 200_000
_REFRESH_SECONDS = 5
_KINDS = {"models": MODELS, "data": DATA, "reports": (Kind.REPORT, Kind.VERDICT)}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:0 auto;padding:1rem;color:#1d2733}
nav a{margin-right:1rem}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:1.6rem}a{color:#2463a8}
div.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #d8dee4;vertical-align:top}
pre{background:#f6f8fa;padding:.6rem;border-radius:6px;overflow:auto;white-space:pre-wrap}
"""
Row = Sequence[tuple[str, str | None]]  # text and address of each cell


def add_ui(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: a free one")


def run_ui(options: argparse.Namespace) -> int:
    store, key = asked_store(options.overrides, options.config_dir), secrets.token_urlsafe(16)
    with bound_socket("127.0.0.1", options.port) as bound:
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/?key={key}"
        shown = json.dumps({"address": address, "store": str(store)})
        text = f"{address}\nshows {relative(store)}, and changes nothing; Ctrl-C ends"
        serve_app(site(store, key), bound, shown if options.json else text)
    return 0


def site(store: Path, key: str) -> "Starlette":
    """The site. A first address with the key sets a cookie, without which nothing is shown."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse, RedirectResponse
    from starlette.routing import Route

    async def keyed(request: "Request", call_next: "Callable[[Request], Awaitable[Response]]") -> "Response":
        sent = request.query_params.get("key", request.cookies.get("key", ""))
        if not hmac.compare_digest(sent.encode(), key.encode()):
            return PlainTextResponse("open the address that posttrain ui printed, which has the key", status_code=403)
        if not request.url.path.isprintable() or "\ufffd" in request.url.path:
            return PlainTextResponse("an address of letters that can be read is accepted; / lists all", status_code=400)
        if "key" not in request.query_params:
            return await call_next(request)
        answer = RedirectResponse("/")
        answer.set_cookie("key", key, httponly=True, samesite="strict")
        return answer

    pages = _Pages(store)
    routes = {
        "/": pages.overview, "/list/{kind}": pages.listed, "/artifact/{node}": pages.artifact,
        "/lineage/{node}": pages.lineage, "/page/{node}": pages.page, "/curves/{ref:path}": pages.curves,
        "/log/{ref:path}": pages.log, "/rows/{node}": pages.rows, "/sweep/{name}": pages.sweep,
    }  # fmt: skip

    def refused(request: "Request", error: Exception) -> "Response":
        return PlainTextResponse(f"{error}\n/ lists what there is", status_code=getattr(error, "status_code", 404))

    return Starlette(
        routes=[Route(path, page, methods=["GET"]) for path, page in routes.items()],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(BaseHTTPMiddleware, dispatch=keyed),
        ],
        exception_handlers=dict.fromkeys((PipelineError, OSError, HTTPException), refused),
    )


class _Pages:
    """The pages. Each reads the store when it is asked for, in a thread of Starlette's."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def _index(self) -> "Index":
        from lineage.graph.index import Index

        return Index(self.store)

    def overview(self, request: "Request") -> "Response":
        """Running and last runs, the newest models, the sweeps."""
        from flows.reports.run import views
        from lineage.graph.index import ARTIFACT

        live, last = views(self.store)
        with self._index() as index:
            newest = index.artifacts(f"{ARTIFACT} WHERE kind IN ({_quoted(MODELS)}) ORDER BY end DESC LIMIT 10")
            aliases = {node: alias for alias, node in index.aliases.items()}
        sweeps = sorted((path for path in (self.store / "sweeps").glob("*") if path.is_dir()), reverse=True)
        body = [
            _table("Running", ("run", "stage", "state"), list(_run_rows(live))) if live else "<p>nothing runs</p>",
            _table("Last runs", ("run", "stage", "state"), list(_run_rows(last))),
            _table("Newest models", _COLUMNS, [_artifact_row(each, aliases) for each in newest]),
            _table("Sweeps", ("sweep",), [((path.name, f"/sweep/{path.name}"),) for path in sweeps]),
        ]
        return _answer("runs", body, refresh=bool(live))

    def listed(self, request: "Request") -> "Response":
        """Artifacts of some kinds, newest first, a page of them."""
        from lineage.graph.index import ARTIFACT

        kind = request.path_params["kind"]
        asked = request.query_params.get("page", "1")
        page = min(max(int(asked), 1), 10**6) if asked.isdecimal() else 1
        where = f"WHERE kind IN ({_quoted(_KINDS[kind])})" if kind in _KINDS else ""
        limit = f"LIMIT {_PAGE + 1} OFFSET {(page - 1) * _PAGE}"
        with self._index() as index:
            found = index.artifacts(f"{ARTIFACT} {where} ORDER BY end DESC, key {limit}")
            aliases = {node: alias for alias, node in index.aliases.items()}
        rows = [_artifact_row(each, aliases) for each in found[:_PAGE]]
        more = f'<p><a href="/list/{html.escape(kind)}?page={page + 1}">older</a></p>' if len(found) > _PAGE else ""
        return _answer(kind, [_table(f"{kind.capitalize()}, page {page}", _COLUMNS, rows), more])

    def artifact(self, request: "Request") -> "Response":
        """What the record says of one artifact, and the pages about it."""
        from lineage.graph.ancestry import ancestry
        from lineage.graph.refs import resolve

        ref = request.path_params["node"]
        with self._index() as index:
            graph = ancestry(index, resolve(ref, index).node)
        node = graph.nodes[graph.root]
        manifest = node.manifest
        if manifest is None:
            return _answer(node.id, [f"<p>{html.escape(node.id)} is a source, or no longer in the store</p>"])
        pages = [("lineage", f"/lineage/{node.id}"), ("log", f"/log/{node.id}")]
        pages += [("page", f"/page/{node.id}"), ("curves", f"/curves/{node.id}")] if manifest.produces in MODELS else []
        pages += [("rows", f"/rows/{node.id}")] if node.entry and (node.entry.output / _REPORT).is_file() else []
        links = " ".join(f'<a href="{html.escape(address)}">{name}</a>' for name, address in pages)
        facts = [("pipeline", manifest.pipeline), ("method", manifest.method), ("fingerprint", manifest.fingerprint)]
        facts += [("digest", manifest.output_digest), ("aliases", ", ".join(node.aliases))]
        facts += [("labels", ", ".join(sorted(node.labels))), *(("export", each.summary()) for each in node.exports)]
        inputs: list[Row] = [
            ((edge.slot, None), (edge.parent, None if edge.parent.startswith(SOURCE) else f"/artifact/{edge.parent}"))
            for edge in graph.parents(node.id)
        ]
        recipe = [(key, json.dumps(value)) for key, value in manifest.recipe.items()]
        metrics = [(key, f"{value:.6g}") for key, value in manifest.metrics.items()]
        return _answer(node.id, [
            f"<p>{links}</p>", _table("Record", ("", ""), _plain(facts)),
            _table("Made from", ("slot", "artifact"), inputs),
            _table("Recipe", ("field", "value"), _plain(recipe)),
            _table("Measured", ("metric", "value"), _plain(metrics)),
        ])  # fmt: skip

    def lineage(self, request: "Request") -> "Response":
        from starlette.responses import HTMLResponse

        from flows.reports.page import render
        from lineage.graph.ancestry import ancestry
        from lineage.graph.refs import resolve

        ref = request.path_params["node"]
        with self._index() as index:
            return HTMLResponse(render(ancestry(index, resolve(ref, index).node).to_dict(ref)))

    def page(self, request: "Request") -> "Response":
        """All that the record says of a model."""
        from starlette.responses import HTMLResponse

        from flows.reports.model import model_page, model_report

        with self._index() as index:
            return HTMLResponse(model_page([model_report(request.path_params["node"], index)]))

    def curves(self, request: "Request") -> "Response":
        from starlette.responses import HTMLResponse

        from flows.reports.diagnosis import diagnosis_page, read_diagnosis

        found = read_diagnosis(request.path_params["ref"], self.store)
        return HTMLResponse(diagnosis_page(found), headers=_refreshing(not found.entry.is_finished()))

    def log(self, request: "Request") -> "Response":
        from flows.progress.stage_log import stage_entry

        entry = stage_entry(request.path_params["ref"], self.store)
        try:
            with entry.log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LOG_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            text = "there is no log"
        return _answer(
            f"log of {request.path_params['ref']}", [f"<pre>{html.escape(text)}</pre>"],
            refresh=not entry.is_finished(),
        )  # fmt: skip

    def rows(self, request: "Request") -> "Response":
        """The report that a data stage wrote."""
        from starlette.responses import FileResponse

        from flows.progress.stage_log import stage_entry
        from lineage.errors import ArtifactError

        page = stage_entry(request.path_params["node"], self.store).output / _REPORT
        if not page.is_file():
            raise ArtifactError(f"{page}: is no longer there")
        return FileResponse(page)

    def sweep(self, request: "Request") -> "Response":
        """Optuna's plots of a sweep, or the table of its trials."""
        from starlette.responses import FileResponse

        from lineage.errors import ArtifactError

        name = request.path_params["name"]
        folder = self.store / "sweeps" / Path(name).name
        if (folder / "plots.html").is_file():
            return FileResponse(folder / "plots.html")
        tables = sorted(folder.glob("*.csv"))
        if not tables:
            raise ArtifactError(f"{folder}: has no trials yet")
        return _answer(name, [f"<pre>{html.escape(path.read_text(encoding='utf-8'))}</pre>" for path in tables])


_COLUMNS = ("artifact", "pipeline", "method", "made", "alias")


def _artifact_row(each: "Indexed", aliases: dict[str, str]) -> Row:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.end))
    method = each.method.rpartition(".")[2]
    rest = _plain([(each.pipeline, method, made, aliases.get(each.id, ""))])[0]
    return ((each.id, f"/artifact/{each.id}"), *rest)


def _plain(rows: Sequence[Sequence[str]]) -> list[Row]:
    """Rows without links; those without a value are left out."""
    return [[(text, None) for text in row] for row in rows if any(row[1:])]


def _quoted(kinds: Sequence[Kind]) -> str:
    return ", ".join(f"'{kind}'" for kind in kinds)


def _run_rows(runs: "Sequence[RunView]") -> Iterator[Row]:
    for run in runs:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.record.started))
        yield _plain([(f"{run.record.id} {run.record.pipeline}", began, f"{run.state}, {clock(run.seconds)}")])[0]
        for stage in run.stages:
            if stage.record.state in ("pending", "reused"):
                continue
            state = stage.progress.describe() if stage.progress else stage.record.state
            directory = Path(stage.record.directory)
            node = f"{directory.parent.name}@{directory.name}" if stage.record.directory else stage.title
            found = f" ({counted(len(stage.findings), 'finding')})" if stage.findings else ""
            yield (("", None), (stage.title, f"/curves/{node}"), (f"{state}{found}", f"/log/{node}"))


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in columns)
    lines = ["<tr>" + "".join(f"<td>{_cell(*cell)}</td>" for cell in row) + "</tr>" for row in rows]
    body = f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>' if rows else "<p>none</p>"
    return f"<h2>{html.escape(title)}</h2>{body}"


def _cell(text: str, address: str | None) -> str:
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>' if address else html.escape(text)


def _answer(title: str, body: Sequence[str], *, refresh: bool = False) -> "Response":
    from starlette.responses import HTMLResponse

    links = {"runs": "/", **{name: f"/list/{name}" for name in _KINDS}, "all": "/list/all"}
    nav = "".join(f'<a href="{address}">{name}</a>' for name, address in links.items())
    page = html_page(
        title=html.escape(title), style=_STYLE, policy=_POLICY,
        body=f"<nav>{nav}</nav><h1>{html.escape(title)}</h1>{''.join(body)}",
    )  # fmt: skip
    return HTMLResponse(page, headers=_refreshing(refresh))


def _refreshing(is_live: bool) -> dict[str, str]:
    """Headers of a page that shows what still runs: a browser loads it again after some seconds."""
    return {"Refresh": str(_REFRESH_SECONDS)} if is_live else {}
