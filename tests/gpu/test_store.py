from tests.gpu import store


def test_the_last_record_of_a_key_counts_and_a_cut_line_does_not(tmp_path):
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for key, result in (("x", 1), ("y", 2), ("x", 3)):
        store.append(file, {"key": key, "result": result})
    store.append(other, {"key": "y", "result": 4})
    with file.open("a") as cut:
        cut.write('{"key":"z","resu')
    found = store.read([file, other, tmp_path / "none.jsonl"])
    assert {key: record["result"] for key, record in found.items()} == {"x": 3, "y": 4}
