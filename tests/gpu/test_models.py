from tests.gpu import models


def test_the_large_target_is_of_a_realistic_size():
    assert 4e9 < models.parameters() < 8e9


def test_the_attention_only_target_takes_the_fixtures_drafters():
    shapes = models.attention_shapes()
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (4096, 384)
    assert len(shapes) == 3 + 11 * models.ATTENTION["num_hidden_layers"]
