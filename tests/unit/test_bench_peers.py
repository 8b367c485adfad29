import pytest

from bench.peers import TOLERANCE, demonstration, disagreements

OWN = {"cpt": [8.0, 7.0], "sft": [6.0, 5.0], "reward": [0.7, 0.6], "dpo": [0.69, 0.65]}


@pytest.mark.parametrize("name", OWN)
def test_another_mean_loss_is_named(name):
    off = {**OWN, name: [loss * (1 + 1.1 * TOLERANCE[name]) for loss in OWN[name]]}
    (found,) = disagreements({"posttrain": OWN, "trl": off})
    assert found.startswith(f"trl {name}: mean loss")


def test_a_side_with_fewer_steps_or_no_number_does_not_agree():
    assert list(disagreements({"posttrain": OWN, "trl": {**OWN, "dpo": [0.67]}}))
    assert list(disagreements({"posttrain": OWN, "trl": {**OWN, "dpo": [float("nan"), 0.65]}}))


def test_a_reward_head_of_its_own_may_start_elsewhere_but_not_diverge():
    def of_llamafactory(share):
        return {"posttrain": OWN, "llamafactory": {**OWN, "reward": [loss * share for loss in OWN["reward"]]}}

    assert not list(disagreements(of_llamafactory(1.1)))
    assert list(disagreements(of_llamafactory(1.2)))


def test_rows_of_the_demonstration_sets_are_messages(tmp_path):
    (tmp_path / "c4_demo.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "alpaca_en_demo.json").write_text('[{"instruction": "Add.", "input": "1+1", "output": "2"}]')
    (tmp_path / "dpo_en_demo.json").write_text(
        '[{"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}], '
        '"chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}]'
    )
    rows = demonstration(tmp_path)
    assert rows["instructions"][0]["messages"][0] == {"role": "user", "content": "Add.\n1+1"}
    assert [each["role"] for each in rows["preferences"][0]["prompt"]] == ["system", "user"]
    assert rows["preferences"][0]["rejected"] == [{"role": "assistant", "content": "B"}]
