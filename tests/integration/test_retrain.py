"""Retraining as data grows: four generations of toys, one of them bad, and two of the real pipeline in miniature."""

import json
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
import pytest

from tests.command import Command
from tests.generations import TOY_RETRAIN, Generations, champion
from tests.miniature import MODEL, STEPS, write_own_rows
from tests.web_server import save_block, webhook


@pytest.fixture
def generations(tmp_path, prefect_url):
    with webhook() as (address, heard):
        environment = {"PREFECT_API_URL": prefect_url}
        block = f"ops-{uuid4().hex[:8]}"  # other tests of this server have saved blocks of theirs
        toy = Command(tmp_path, *TOY_RETRAIN, f"notify=custom-webhook/{block}", environment=environment)
        made = Generations(toy=toy, heard=heard)
        made.grow("good", 60)
        refused = toy("run")
        assert refused.returncode == 2 and f"notify=custom-webhook/{block}: Prefect has no such block" in refused.stderr
        assert "CustomWebhookNotificationBlock(" in refused.stderr
        assert "run" in set(toy.states().values())
        save_block(block, address, toy.environment)
        yield made


def texts(row: dict, side: str) -> set[str]:
    return set(pq.read_table(Path(row["output"]) / f"{side}.parquet")["text"].to_pylist())


@pytest.mark.slow
def test_four_generations_of_growing_data_end_with_the_right_champion(generations):
    folder = generations.toy.folder
    first = generations.run()
    one = first["learner"]["fingerprint"][:16]
    assert champion(folder) == one
    generations.say("learner is the new champion", "New rows: data 60.", f"Alias champion: learner@{one}")

    generations.grow("good", 60)
    second = generations.run()
    two = second["learner"]["fingerprint"][:16]
    assert champion(folder) == two != one
    assert "blank" not in second  # nothing reads it while there is a champion to start from
    assert second["learner"]["inputs"]["policy"] == first["learner"]["fingerprint"]
    metrics = second["data"]["metrics"]
    assert (metrics["rows"], metrics["new_rows"]) == (120, 60)
    assert metrics["replayed_rows"] / metrics["train_rows"] == pytest.approx(0.25, abs=0.01)
    generations.say(
        "learner is the new champion", "New rows: data 60 (and 18 replayed).",
        f"New models: learner, from learner@{one}.", "gate passes", f"Alias champion: learner@{two}, before it learner",
    )  # fmt: skip
    # What was held out is so for ever.
    assert texts(first["data"], "held_out") < texts(second["data"], "held_out")
    assert not texts(second["data"], "held_out") & (texts(first["data"], "train") | texts(second["data"], "train"))

    again = generations.run()
    assert {row["state"] for row in again.values()} == {"reuse"}
    assert again["learner"]["fingerprint"] == second["learner"]["fingerprint"]
    assert generations.heard == []

    good = list(generations.rows)
    generations.grow("bad", 20)
    third = generations.run(code=3)
    assert third["learner"]["inputs"]["policy"] == second["learner"]["fingerprint"]
    assert champion(folder) == two
    generations.say("refused", "learns worse", f"Alias champion stays with learner@{two}")
    assert {row["state"] for row in generations.run(code=3).values()} == {"reuse"}
    assert "gate refuses learner: a run ends with exit code 3" in generations.toy("plan").stdout
    assert generations.heard == []

    generations.rows = good
    generations.grow("good", 80)
    fourth = generations.run()
    assert fourth["learner"]["inputs"]["policy"] == second["learner"]["fingerprint"]
    assert fourth["data"]["inputs"]["replay"] == second["data"]["fingerprint"]
    assert champion(folder) == fourth["learner"]["fingerprint"][:16]
    generations.say("learner is the new champion", "New rows: data 80", f"before it learner@{two}")

    # A person takes it back: no rerun gives it again.
    assert generations.toy("rollback", "--alias", "champion", "--why", "complaints").returncode == 0
    assert {row["state"] for row in generations.run().values()} == {"reuse"}
    assert champion(folder) == two
    assert "and a person rolled it back: posttrain promote learner@" in generations.toy("plan").stdout
    assert generations.heard == []

    generations.grow("broken", 60)
    assert generations.toy("run").returncode == 1
    generations.say("failed", "stage learner failed", "told to fail", f"Alias champion stays with learner@{two}.")
    (folder / "rows.jsonl").write_text("no JSON\n")  # the plan refuses it, before anything could fail
    assert generations.toy("run").returncode == 2
    assert generations.heard == []


def test_a_promotion_that_a_kill_prevented_is_made_by_the_next_run(tmp_path, prefect_url):
    toy = Command(tmp_path, *TOY_RETRAIN, environment={"PREFECT_API_URL": prefect_url})
    Generations(toy=toy, heard=[]).grow("good", 60)
    result = toy("run", "--json", "retrain=null")
    assert result.returncode == 0, result.stderr
    assert champion(tmp_path) is None and "outcome" not in json.loads(result.stdout)
    assert "waits for alias champion: a run promotes it" in toy("plan").stdout
    save_block("deaf", "http://127.0.0.1:9/its-secret", toy.environment)
    done = toy("run", "--json", "notify=custom-webhook/deaf")
    assert done.returncode == 0, done.stderr
    assert "posttrain: notify=custom-webhook/deaf: not sent: ConnectError" in done.stderr
    assert "its-secret" not in done.stderr
    document = json.loads(done.stdout)
    assert champion(tmp_path) == document["stages"][2]["fingerprint"][:16]
    assert document["outcome"].startswith("toy-retrain: New rows: data 60. gate passes learner@")


def test_each_notification_block_of_prefect_is_reported_creation_hint_one():
    from flows.promotion.notify import _creation_hint

    assert "SlackWebhook(url='...').save('team')" in _creation_hint("slack-webhook/team")
    assert "json_data={'text': '{{subject}}: {{body}}'}" in _creation_hint("custom-webhook/team")
    assert "did you mean slack-webhook?" in _creation_hint("slack-webhok/team")


@pytest.mark.slow
def test_the_real_pipeline_resumes_from_its_champion(tmp_path, prefect_url):
    rows = write_own_rows(tmp_path, 60)
    mini = Command(
        tmp_path, "pipeline=cpt-sft-dpo-retrain", *MODEL, *STEPS, *rows, "stages.gate.method.inconclusive=promote",
        environment={"PREFECT_API_URL": prefect_url},
    )  # fmt: skip
    first = mini.run()
    assert champion(tmp_path) == first["dpo"]["fingerprint"][:16]
    assert first["cpt"]["inputs"]["policy"] == first["base"]["fingerprint"]
    write_own_rows(tmp_path, 100)
    second = mini.run()
    assert "base" not in second
    assert second["cpt"]["inputs"]["policy"] == first["dpo"]["fingerprint"]
    for data in ("corpus", "instructions", "preferences"):
        metrics = second[data]["metrics"]
        assert metrics["new_rows"] == 40
        assert metrics["replayed_rows"] / metrics["train_rows"] == pytest.approx(0.3, abs=0.02)
    assert champion(tmp_path) == second["dpo"]["fingerprint"][:16]
    assert set(mini.states().values()) == {"reuse"}
    # Without a row the champion has to be renounced too: it, and what is replayed, have met it.
    assert "stages.corpus.inputs.replay, stages.cpt.inputs.policy" in mini("impact", "source:corpus").stdout
