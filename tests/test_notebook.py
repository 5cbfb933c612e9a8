"""The ledger in a notebook: a fragment that stands alone, in real kernels where one is installed."""

import re

import pytest

import headway
from headway.core.errors import InputError
from headway.report.page.html import fragment
from headway.runtime.in_rank.in_process import InProcessRun
from tests.paths import ROOT
from tests.report_data import demo_why
from tests.test_html_report import _Outline
from tests.training import small, train

CELLS = [
    "import torch, headway\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "def train():\n    for _ in range(5):\n        model(torch.ones(2, 4)).mean().backward()\n"
    "        optimizer.step()\n    print('trained')",
    "with headway.run() as run:\n    train()\nrun",
    "run = headway.run().start()",
    "train()\nraise KeyboardInterrupt",
    "train()",
    "run.stop()\nrun",
]
"""A notebook as people write it: a block in a cell, then a recording over cells, one of them interrupted."""


def test_the_fragment_is_whole_and_reaches_nothing_outside_itself():
    markup = fragment(demo_why() | {"verdict": {"command": "headway plan x"}})
    outline = _Outline(markup)
    seen = {name for tag, attributes in outline.tags for name in (tag, *(f"@{name}" for name in attributes))}

    assert outline.open == []
    assert not {"script", "link", "img", "iframe", "h1", "h2", "@id", "@onclick", "@src", "@href"} & seen
    assert "://" not in markup
    assert "headway plan x" in markup
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", markup.partition("<style>")[2].partition("</style>")[0])
    assert all(".headway" in selector for selector in rules)


def test_text_of_a_run_is_shown_and_never_interpreted():
    why = demo_why()
    why["causes"][0]["where"] = "<script>alert(1)</script>"

    assert "<script>" not in fragment(why)
    assert "&lt;script&gt;" in fragment(why)


def trained(run):
    """Take five steps while `run` records."""
    with run:
        train(*small(), 5)


def test_a_finished_recording_shows_every_bucket_that_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = headway.run()
    assert run._repr_html_() is None
    trained(run)
    markup = run._repr_html_()

    assert re.search(r"Steps</dt><dd>5<", markup)
    assert re.search(r"useful.*startup.*unknown", markup, re.DOTALL)


def test_a_recording_answers_in_python_when_it_has_ended(tmp_path):
    run = headway.run(tmp_path / "run")
    trained(run)
    again = headway.open_run(tmp_path / "run")

    assert run.ledger.steps == run.why()["steps"] == again.ledger.steps == 5
    assert run.why()["verdict"]["command"].startswith("headway report")
    assert "<h1>" in again.report(tmp_path / "page.html").read_text()
    with pytest.raises(InputError, match="no run folder to read"):
        headway.open_run(tmp_path / "none")
    with pytest.raises(InputError, match="no run folder to read"):
        headway.run(enabled=False).why()


def test_a_ledger_that_cannot_be_drawn_is_one_warning(tmp_path, capsys):
    with headway.run(tmp_path / "run") as run:
        pass
    (tmp_path / "run" / "run.json").write_text("{")

    assert run._repr_html_() is None
    assert "cannot be shown" in capsys.readouterr().err


def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "notebooks-and-trainers.md").read_text()
    cells: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, cells)

    assert isinstance(cells["run"], InProcessRun)
    assert len(list((tmp_path / "headway-runs").iterdir())) == 2


@pytest.mark.slow
def test_a_real_kernel_runs_the_cells_and_shows_two_ledgers(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="no notebook client here")
    v4 = pytest.importorskip("nbformat.v4")
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=100, allow_errors=True, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [
        output.data for cell in notebook.cells for output in cell.outputs if output.output_type == "execute_result"
    ]
    printed = [o.text for cell in notebook.cells for o in cell.outputs if o.get("name") == "stdout"]

    assert printed == ["trained\n"] * 3
    assert "Steps</dt><dd>5<" in shown[0]["text/html"]
    assert "Steps</dt><dd>10<" in shown[-1]["text/html"]
    assert "headway why" in shown[-1]["text/plain"]
