"""Patching models of transformers: every family by one mechanism, with the tools that people use around them."""

import copy
import functools

import pytest
import torch

import tilewright as tw

transformers = pytest.importorskip("transformers")

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    max_position_embeddings=32,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Phi3", "Mixtral", "Qwen3Moe", "Granite"]


@functools.cache
def made(family: str):
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**SIZES))


def model_of(family: str):
    return copy.deepcopy(made(family)).train()


@pytest.fixture
def batch():
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone().index_fill_(1, torch.tensor([3]), -100)}


def losses_and_gradients(model, batch):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_every_family_are_found_and_agree(family, batch):
    model = model_of(family)
    before, expected = losses_and_gradients(model, batch)
    with tw.apply(model) as patched:
        kinds = {site.kind for site in patched.sites}
        assert {"head", "norm", "rope"} <= kinds
        assert ("mlp" in kinds) == (family not in ("Mixtral", "Qwen3Moe"))
        assert ("residual" in kinds) == (family != "Phi3")  # whose layers have dropout
        after, gradients = losses_and_gradients(model, batch)
        assert after.logits is None
    torch.testing.assert_close(after.loss, before.loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    again, _ = losses_and_gradients(model, batch)
    assert torch.equal(again.loss, before.loss)
    assert torch.equal(again.logits, before.logits)


def test_gpt2_bert_and_vit():
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31))
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**small, vocab_size=31))
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=32))
    found = [{site.kernel for site in tw.apply(model).sites} for model in (gpt2, bert, vit)]
    assert found == [{"layer_norm", "gelu", "linear_cross_entropy"}, {"layer_norm", "gelu"}, {"layer_norm", "gelu"}]


def test_logits_on_request(batch):
    model = model_of("Llama")
    expected = model(**batch)
    patched = tw.apply(model)
    with patched.without("head"):
        torch.testing.assert_close(model(**batch).logits, expected.logits)
    assert model(**batch).logits is None
    assert model(input_ids=batch["input_ids"]).logits is not None
    assert model.eval()(**batch).logits is not None


def test_labels_scaled_by_the_items_of_an_accumulated_batch(batch):
    model = model_of("Llama")
    expected = model(**batch, num_items_in_batch=torch.tensor(5)).loss
    tw.apply(model)
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(5)).loss, expected)
    torch.testing.assert_close(model(**batch, num_items_in_batch=5).loss, expected)


def test_the_loss_of_a_bf16_model_is_float32(batch):
    model = model_of("Llama").to(torch.bfloat16)
    tw.apply(model)
    assert model(**batch).loss.dtype == torch.float32


def test_a_loss_function_of_the_users_is_called(batch):
    model = model_of("Llama")
    tw.apply(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    output = model(**batch)
    torch.testing.assert_close(output.loss, output.logits.sum())


def test_a_tuple_on_request(batch):
    model = model_of("Llama")
    expected = model(**batch, return_dict=False)
    tw.apply(model)
    result = model(**batch, return_dict=False)
    assert type(result) is tuple
    torch.testing.assert_close(result[0], expected[0])


def test_generation(batch):
    model = model_of("Llama").eval()
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = model.generate(batch["input_ids"], **options)
    tw.apply(model)
    assert torch.equal(model.generate(batch["input_ids"], **options), expected)


def test_a_padded_batch_with_positions_of_its_own(batch):
    model = model_of("Llama").eval()
    options = dict(
        attention_mask=torch.ones(2, 9).index_fill(1, torch.tensor([0, 1]), 0),
        position_ids=torch.stack([torch.arange(9), torch.arange(5, 14)]),
    )
    expected = model(**batch, **options).logits
    tw.apply(model)
    torch.testing.assert_close(model(**batch, **options).logits, expected, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing(batch):
    model = model_of("Llama")
    _, expected = losses_and_gradients(model, batch)
    tw.apply(model)
    model.gradient_checkpointing_enable()
    _, gradients = losses_and_gradients(model, batch)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_compiled_without_graph_breaks(batch):
    model = model_of("Llama")
    expected = model(**batch).loss
    tw.apply(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(**batch)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()


def test_saved_weights_are_those_of_the_original(batch, tmp_path):
    model = model_of("Llama")
    tw.apply(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()
    with tw.apply(loaded):
        torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss)


def test_hidden_states_and_attentions_are_still_captured(batch):
    model = model_of("Llama")
    expected = model(**batch, output_hidden_states=True)
    tw.apply(model)
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == len(expected.hidden_states)
    torch.testing.assert_close(output.hidden_states[-1], expected.hidden_states[-1], rtol=1e-4, atol=1e-5)


def test_a_hook_on_a_fused_norm_still_runs(batch):
    model = model_of("Llama")
    tw.apply(model)
    seen = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))
    model(**batch)
    assert seen == [1]


@pytest.mark.parametrize("first", ["adapters", "kernels"])
def test_adapters_on_every_projection_and_the_head_are_trained(batch, first):
    peft = pytest.importorskip("peft")
    model = model_of("Llama")
    config = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "down_proj", "lm_head"], r=2)
    if first == "kernels":
        tw.apply(model)
    model = peft.get_peft_model(model, config)
    if first == "adapters":
        tw.apply(model)
    model(**batch).loss.backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lm_head" in name for name in trained)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_a_trainer_with_accumulation_takes_the_same_steps(tmp_path):
    pytest.importorskip("accelerate")
    rows = torch.randint(3, 61, (8, 9), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    ends = []
    for patch in (False, True):
        model = model_of("Llama")
        if patch:
            tw.apply(model)
        args = transformers.TrainingArguments(**options)
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_diff_covers_the_fused_parts(batch, family):
    difference = tw.diff(model_of(family).to(torch.bfloat16), batch)
    assert difference, str(difference)
    names = {row.name for row in difference.rows}
    assert "lm_head" not in names
    assert "lm_head.weight" in names or family == "Gemma2"  # whose head is the embedding
