"""Retraining as a team has it: rows are appended, nobody calls anything, and whoever is to know is told."""

import pytest

from tests.command import Command, wait_until
from tests.generations import TOY_RETRAIN, Generations, champion
from tests.triggered_runs import Server, serving
from tests.web_server import save_block, webhook

WORDS = (*TOY_RETRAIN, "notify=custom-webhook/ops")
TRIGGER = "trigger={sources: [rows], poll: 0.3, settle: 0.5}"


@pytest.fixture
def generations(tmp_path, prefect_url):
    """The first is there, with its champion."""
    toy = Command(tmp_path, *WORDS, environment={"PREFECT_API_URL": prefect_url})
    with webhook() as (address, heard):
        save_block("ops", address, toy.environment)
        made = Generations(toy=toy, heard=heard)
        made.grow("good", 60)
        made.run()
        heard.clear()
        yield made


@pytest.mark.slow
def test_rows_that_are_appended_move_the_champion_or_leave_it_and_the_team_is_reported(generations, prefect_url):
    folder, server = generations.toy.folder, Server(prefect_url)
    one = champion(folder)
    with serving(server, folder, *WORDS, TRIGGER):
        generations.grow("good", 60)
        wait_until(lambda: server.ended() == 1, "the good rows are learnt")
        two = champion(folder)
        moved = f"Alias champion: learner@{two}, before it learner@{one}"
        generations.say("learner is the new champion", "New rows: data 60", moved)
        generations.grow("bad", 20)
        wait_until(lambda: server.ended() == 2, "the bad rows are learnt")
        generations.say("refused", "learns worse", f"Alias champion stays with learner@{two}")
        passed, refused = server.runs()
    assert two != one
    assert champion(folder) == two
    assert server.triggers() == [{"trigger:rows"}] * 2
    assert (passed["state"]["name"], refused["state"]["name"]) == ("Completed", "ChampionKept")
    assert moved in passed["state"]["message"]
    assert "learns worse" in refused["state"]["message"]
