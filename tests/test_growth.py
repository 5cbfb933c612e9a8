"""A grown model has the small one's outputs, learns what the small one could not, and refuses what is not lossless."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from headway.core.errors import BarMissedError, InputError
from headway.core.rng import stream
from headway.model import FAMILIES, grow, growth_schedule
from headway.model.growth.families import family_of, roles_of
from headway.model.growth.torch_model import max_relative_error
from tests.growth_models import GPT2, Bert, Encoder, Llama, LlamaRMSNorm, NeoX, Paired, Scaled, ViT
from tests.launching import code_and_json, json_of, refusal

BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}
TRAINED = {"width": 16, "layers": 2, "heads": 2, "hidden": 24}
LARGER = {"width": 40, "layers": 5, "heads": 3, "hidden": 70}


def trained(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model none of whose parameters is as it was made: no gain 1, no bias 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in model.parameters():
            each += (
                0.3 * torch.randn(each.shape, generator=generator) * (1 if each.ndim < 2 else each.shape[-1] ** -0.5)
            )
    return model.to(dtype).eval()


def drawn(kind: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """Return a small and a large model of random sizes; widths are seldom multiples."""
    rng = stream(seed, "growth", kind)
    width, layers, heads = (int(rng.integers(*span)) for span in ((6, 40), (1, 4), (1, 4)))
    small = {"width": width, "layers": layers, "heads": heads, "hidden": int(rng.integers(4, 50))}
    large = {
        "width": width + int(rng.integers(0, 3 * width)), "layers": layers + int(rng.integers(0, 5)),
        "heads": heads + int(rng.integers(0, 5)), "hidden": small["hidden"] + int(rng.integers(0, 90)),
    }  # fmt: skip
    if kind in ("llama", "llama tied"):
        groups = int(rng.integers(1, 4))
        for sizes in (small, large):
            sizes["kv"], sizes["heads"] = sizes["heads"], sizes["heads"] * groups
        return (Llama(**sizes, tied=kind == "llama tied") for sizes in (small, large))  # type: ignore[return-value]
    if kind == "torch":  # the width is that of the heads
        small["width"], large["width"] = 8 * small["heads"], 8 * large["heads"]
        return Encoder(**small), Encoder(**large)
    if kind == "bert":
        large["width"], large["layers"] = width * int(rng.integers(1, 4)), layers
    makers = {"gpt2": lambda **s: GPT2(**s, tied=False), "gpt2 tied": GPT2, "bert": Bert, "vit": ViT, "neox": NeoX}
    return makers[kind](**small), makers[kind](**large)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "gpt2 tied", "llama", "llama tied", "bert", "vit", "torch", "neox"])
def test_a_grown_model_has_the_outputs_of_the_small_one(kind, dtype):
    for seed in range(20):
        choices = {"depth": ("zero", "cancel")[seed % 2], "split": ("random", "equal")[seed // 2 % 2], "seed": seed}
        for eps in ("scale", "keep"):
            small, large = drawn(kind, seed)
            small, large = trained(small, dtype), large.to(dtype)
            grow(small, large, eps=eps, **choices)

            assert max_relative_error(small, large, eps=eps) <= BOUND[dtype], (seed, eps)


def test_expanding_twice_is_lossless_and_the_same_shape_is_the_identity():
    small, middle, large = (trained(GPT2(w, n, h, 3 * w)) for w, n, h in ((12, 1, 2), (20, 2, 3), (50, 5, 7)))
    same = grow(small, GPT2(12, 1, 2, 36).double())
    grow(grow(small, middle), large)

    assert max_relative_error(small, large) <= 1e-12
    assert all(torch.equal(same.state_dict()[name], each) for name, each in small.state_dict().items())


@pytest.mark.parametrize(("split", "are_apart"), [("random", True), ("equal", False)])
def test_after_one_step_copies_differ_unless_the_split_is_equal(split, are_apart):
    small, large = trained(GPT2(**TRAINED)), GPT2(**{**TRAINED, "width": 32, "heads": 4, "hidden": 48}).double()
    grow(small, large, split=split)
    ids = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(0))
    before = large.transformer.h[0].mlp.c_fc.weight.detach().clone()
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    nn.functional.cross_entropy(large(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    moved = (large.transformer.h[0].mlp.c_fc.weight - before).T  # of each hidden unit; unit 24 + i is a copy of i
    cosine = nn.functional.cosine_similarity(moved[:24], moved[24:], dim=1)

    assert bool((cosine.abs() < 0.999).all()) == are_apart


def test_encoders_with_no_final_norm_with_norms_after_the_addition_or_of_features_are_lossless_too():
    for first, final, features in ((True, False, 0), (False, True, 0), (True, True, 5)):
        sizes = {"layers": 2, "heads": 2, "hidden": 24, "first": first, "final": final, "features": features}
        small = trained(Encoder(16, **sizes))
        large = Encoder(32 if not first else 40, **{**sizes, "heads": 4 if not first else 5}).double()

        assert max_relative_error(small, grow(small, large)) <= 1e-12
        assert max_relative_error(small, grow(small, large, eps="keep"), eps="keep") <= 1e-12


def test_norms_get_eta_squared_of_the_epsilon_or_keep_it():
    small = trained(Llama(16, 1, 2, 1, 24))
    scaled, kept = (grow(small, Llama(40, 1, 2, 1, 24, eps=1e-3).double(), eps=eps) for eps in ("scale", "keep"))

    assert scaled.model.norm.variance_epsilon == pytest.approx(1e-5 * 32 / 40)
    assert kept.model.norm.variance_epsilon == 1e-5


NAMES = {
    "vit": "deit.embeddings.cls_token deit.embeddings.distillation_token deit.layers.0.attention.q_proj.weight "
    "deit.layers.0.attention.o_proj.bias deit.layers.0.layernorm_before.weight deit.layers.0.mlp.fc1.weight "
    "deit.layers.0.mlp.fc2.bias deit.layernorm.bias distillation_classifier.weight",
    "opt": "model.decoder.embed_positions.weight model.decoder.final_layer_norm.bias lm_head.weight "
    "model.decoder.layers.0.self_attn.out_proj.weight model.decoder.layers.0.self_attn_layer_norm.bias "
    "model.decoder.layers.0.fc2.weight model.decoder.layers.0.final_layer_norm.weight",
    "bert": "roberta.encoder.layer.0.attention.self.query.weight roberta.embeddings.LayerNorm.bias lm_head.bias "
    "lm_head.dense.weight lm_head.layer_norm.bias lm_head.decoder.weight classifier.out_proj.bias",
}
"""Family -> names of transformers 5: DeiT, OPT, RoBERTa."""


@pytest.mark.parametrize("family", NAMES)
def test_names_of_transformers_are_known_and_a_model_of_others_is_told_what_has_no_row(family):
    names = NAMES[family].split()
    assert family_of(names) == family
    assert roles_of(names, family).keys() == set(names)
    with pytest.raises(InputError, match=r"nearest, '\w+', has rows for \d+ of its \d+ names, and none for mine\.0"):
        family_of([*names, *(f"mine.{number}" for number in range(10))])


def test_outputs_that_differ_are_an_error_from_python_too_and_what_was_not_compared_is_warned_of():
    small, large = trained(Scaled(**TRAINED)), Scaled(**LARGER).double()
    with pytest.raises(BarMissedError, match="something else in it depends on its size"):
        grow(small, large)
    with pytest.warns(UserWarning, match="so nothing was compared"):
        grow(trained(Paired(**TRAINED)), Paired(**LARGER).double())


def test_a_row_makes_an_unknown_parameter_known():
    small, large = trained(GPT2(**TRAINED)), GPT2(**LARGER).double()
    for model in (small, large):
        model.transformer.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(InputError, match=r"transformer\.scale.*FAMILIES\[\"gpt2\"\]\.insert"):
        grow(small, large)

    FAMILIES["gpt2"].insert(0, ("scale", "same"))
    try:
        assert max_relative_error(small, grow(small, large)) <= 1e-12
    finally:
        FAMILIES["gpt2"].pop(0)


@pytest.mark.parametrize(
    ("small", "large", "words"),
    [
        (GPT2(16, 1, 2, 24), GPT2(12, 1, 2, 24), r"width shrinks from 16 to 12"),
        (GPT2(16, 1, 2, 24), GPT2(16, 1, 2, 20), r"c_fc\.weight: shape \(24, 16\) cannot become \(20, 16\)"),
        (GPT2(16, 3, 2, 24), GPT2(16, 2, 2, 24), "2 layers, the small one 3"),
        (GPT2(16, 1, 2, 24), GPT2(16, 1, 2, 24, size=16), r"transformer\.h\.0\.attn\.c_attn: the head size changes"),
        (GPT2(16, 1, 2, 24, tied=False), GPT2(16, 1, 2, 24), r"lm_head\.weight is tied in the large model"),
        (Llama(16, 1, 4, 1, 24), Llama(16, 1, 4, 2, 24), "4 query heads share a key head"),
        (GPT2(16, 1, 2, 24), Llama(16, 1, 4, 2, 24), "family 'gpt2' has no row for model.embed_tokens.weight"),
        (Bert(16, 1, 2, 24), Bert(24, 1, 2, 24), "only a multiple of the width 16"),
        (Bert(16, 1, 2, 24), Bert(16, 2, 2, 24), "no new block leaves the stream as it is"),
        (nn.Linear(2, 2), nn.Linear(2, 2), "no family of models has layers named like weight, bias"),
    ],
)
def test_what_cannot_grow_without_loss_is_refused_and_nothing_is_written(small, large, words):
    before = {name: each.clone() for name, each in large.state_dict().items()}

    with pytest.raises(InputError, match=words):
        grow(small, large)
    assert all(torch.equal(each, before[name]) for name, each in large.state_dict().items())


def test_batch_norm_experts_shared_layers_and_unknown_heads_are_named():
    def models(change):
        pair = GPT2(16, 2, 2, 24), GPT2(32, 2, 2, 24)
        for model in pair:
            change(model)
        return pair

    changes = {
        r"transformer\.extra is BatchNorm1d": lambda m: m.transformer.add_module("extra", nn.BatchNorm1d(3)),
        r"experts\.0\.weight belongs to a mixture": lambda m: m.transformer.h[0].add_module(
            "experts", nn.ModuleList([nn.Linear(2, 2)])
        ),
        "share one weight": lambda m: setattr(
            m.transformer.h[1].mlp.c_fc, "weight", m.transformer.h[0].mlp.c_fc.weight
        ),
        "num_heads": lambda m: m.config.clear(),
        "both kinds": lambda m: setattr(m.transformer, "ln_f", LlamaRMSNorm(16, 1e-5)),
    }
    for words, change in changes.items():
        with pytest.raises(InputError, match=words):
            grow(*models(change))


def test_dropout_in_training_is_warned_of_and_unknown_choices_are_refused():
    with pytest.warns(UserWarning, match="call eval"):
        grow(Encoder(16, 1, 2, 24), Encoder(24, 1, 3, 24))
    with pytest.raises(InputError, match="unknown depth 'zeros'"):
        grow(GPT2(**TRAINED), GPT2(**LARGER), depth="zeros")


def test_the_schedule_has_the_same_peak_and_a_shorter_decay():
    whole, short = growth_schedule(1000, 1.0), growth_schedule(1000, 0.4)

    assert short.num_steps == 400
    assert max(map(short, range(400))) == max(map(whole, range(1000))) == 1.0
    assert [short(step) for step in range(20)] == [whole(step) for step in range(20)]
    assert short(400) == pytest.approx(whole(1000)) == pytest.approx(0.1)
    for share in (0.0, 1.1):
        with pytest.raises(InputError, match="share in"):
            growth_schedule(1000, share)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save a trained model as a DCP checkpoint and as safetensors, in the current folder."""
    monkeypatch.chdir(tmp_path)
    model = trained(GPT2(**TRAINED), torch.float32)
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id="dcp")
    save_file({name: each.clone() for name, each in model.state_dict().items()}, "small.safetensors")
    return model


def verb(checkpoint: str, out: str, large: dict[str, int], *more: str, model: str = "GPT2") -> list[str]:
    sizes = ("--small", json.dumps(TRAINED), "--large", json.dumps(large))
    return ["model", "grow", f"tests.growth_models:{model}", *sizes, "--checkpoint", checkpoint, "-o", out, *more]


@pytest.mark.parametrize(("checkpoint", "out"), [("dcp", "grown"), ("small.safetensors", "grown.safetensors")])
def test_a_grown_checkpoint_loads_in_stock_torch_with_equal_outputs(saved, checkpoint, out):
    answer = json_of(*verb(checkpoint, out, LARGER, "--json"))
    large = GPT2(**LARGER).eval()
    if out.endswith(".safetensors"):
        large.load_state_dict(load_file(out))
    else:
        state = {"model": large.state_dict()}
        dcp.load(state, checkpoint_id=out)
        large.load_state_dict(state["model"])
    ids = torch.arange(10).view(1, 10)
    wanted, found = saved(ids).detach(), large(ids).detach()
    count = [sum(each.numel() for each in model.parameters()) for model in (saved, large)]

    assert (answer["schema"], answer["path"], answer["parameters"]) == ("headway.model-grow/1", out, count)
    assert answer["max_relative_error"] <= 1e-5
    assert float((wanted - found).abs().max() / wanted.abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none", "o", LARGER), "none does not exist"),
        (("dcp", "dcp", LARGER), "dcp exists already"),
        (("dcp", "o", {**LARGER, "width": 8}), "the width shrinks from 16 to 8"),
        (("dcp", "o", {"breadth": 8}), "the model cannot be built with {'breadth': 8}"),
        (("dcp", "o", LARGER, "--prefix", "ema."), "no tensor ema.transformer.wte.weight"),
        (("dcp", "o", LARGER, "--family", "gpt"), "Did you mean 'gpt2'"),
    ],
)
def test_the_verb_says_what_is_wrong_and_writes_nothing(saved, tmp_path, arguments, words):
    assert words in refusal(*verb(*arguments))
    assert not (tmp_path / "o").exists()


def test_a_torch_file_with_one_changed_byte_or_without_its_end_is_one_sentence(saved, tmp_path):
    torch.save(saved.state_dict(), "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    at = whole.index(saved.lm_head.weight.detach().numpy().tobytes())
    for data, code, words in (
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], 3, "a.pt is damaged: a/data/"),
        (whole[: len(whole) // 2], 2, "a.pt cannot be read"),
        (whole[:7], 2, "a.pt cannot be read"),
    ):
        (tmp_path / "a.pt").write_bytes(data)

        ended, said = code_and_json(*verb("a.pt", "o", LARGER))
        assert (ended, said.count("\n")) == (code, 1)
        assert words in said


def test_the_verb_refuses_a_model_that_depends_on_its_size_and_says_what_it_could_not_compare(saved, tmp_path):
    code, said = code_and_json(*verb("dcp", "o", LARGER, model="Scaled"))
    assert (code, "something else in it depends on its size" in " ".join(said.split())) == (3, True)
    assert not (tmp_path / "o").exists()

    answer = json_of(*verb("dcp", "o", LARGER, "--json", model="Paired"))
    assert answer["max_relative_error"] is None
    assert "takes none of the inputs" in answer["not_compared"]
