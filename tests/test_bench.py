"""`headway bench` lists every benchmark of the checkout once, by room."""

import json

from headway.verbs.demo import bench, benchmarks, by_room


def test_every_benchmark_is_listed_once_under_a_room(capsys):
    assert bench(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    names = [name for room in answer["rooms"].values() for name in room]

    assert sorted(names) == sorted(benchmarks()) == sorted(answer["benchmarks"])
    assert "fleet_redundancy" in answer["rooms"]["storage"]
    assert "breakers" in answer["rooms"]["command"]


def test_the_list_is_a_paragraph_for_each_room(capsys):
    assert bench() == 0
    blocks = [block.strip("\n").split("\n") for block in capsys.readouterr().out.split("\n\n")]

    assert [block[0] for block in blocks] == list(by_room(benchmarks()))
    assert all(line.startswith("  ") for block in blocks for line in block[1:])
