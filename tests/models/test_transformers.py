"""Patching models of transformers: every family by one mechanism, with the tools that people use around them."""

import copy
import functools
import pickle

import pytest
import torch

import tilewright as tw
from tilewright.models.replacements import attention

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
        assert {"head", "norm", "residual", "rope"} <= kinds
        assert ("mlp" in kinds) == (family not in ("Mixtral", "Qwen3Moe"))
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
    common = {"add_layer_norm", "layer_norm", "gelu", "scaled_dot_product_attention"}
    assert found == [common | {"linear_cross_entropy"}] * 2 + [common]


def test_the_ends_of_berts_layers(batch):
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=61
    )
    torch.manual_seed(0)
    model, ends = transformers.BertForMaskedLM(config), []
    for _ in range(2):
        torch.manual_seed(1)  # for its dropout
        ends.append(losses_and_gradients(model, batch))
        patched = tw.apply(model)
    assert [site.name.rpartition(".")[2] for site in patched.skipped if site.kind == "post_norm"] == ["output"] * 2
    torch.testing.assert_close(ends[0][0].loss, ends[1][0].loss)
    for name, gradient in ends[0][1].items():
        torch.testing.assert_close(ends[1][1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    seen = []
    end = model.bert.encoder.layer[0].output
    end.LayerNorm.register_forward_hook(lambda *_: seen.append(1))
    model(**batch)
    assert seen == [1]
    with pytest.raises(TypeError, match="input_tensor"):
        end(torch.randn(1, 24))


@functools.cache
def masked_model_of(family: str):
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    if family == "DistilBert":
        sizes = dict(dim=32, hidden_dim=48, n_layers=1, n_heads=4, vocab_size=61)
    if family == "Electra":
        sizes["embedding_size"] = 24
    if family == "ModernBert":
        sizes |= dict(cls_token_id=1, sep_token_id=2)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForMaskedLM")(getattr(transformers, f"{family}Config")(**sizes))


@pytest.mark.parametrize("family", ["Bert", "Electra", "DistilBert", "ModernBert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_heads_that_predict_masked_tokens(family, dtype, batch):
    model = copy.deepcopy(masked_model_of(family)).to(dtype).train()
    options = {"num_items_in_batch": 5, "attention_mask": torch.ones_like(batch["input_ids"]), **batch}
    ends = []
    for _ in range(2):
        torch.manual_seed(1)  # for its dropout
        ends.append(losses_and_gradients(model, options if dtype == torch.float32 else batch))
        patched = tw.apply(model)
    assert "head" not in {s.kind for s in patched.skipped if "already" not in s.reason}
    (before, expected), (after, gradients) = ends
    assert after.logits is None
    assert after.loss.dtype == before.loss.dtype
    close = dict(rtol=1e-3, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.1, atol=0.02)
    torch.testing.assert_close(after.loss, before.loss, **close)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **close, msg=name)
    assert model.eval()(**batch).logits is not None


def test_whatever_is_around_a_head_still_runs(batch):
    model = copy.deepcopy(masked_model_of("Bert")).train()
    tw.apply(model)
    seen = []
    handle = model.cls.predictions.register_forward_hook(lambda *_: seen.append(1))
    assert model(**batch).logits is not None
    assert seen == [1]
    handle.remove()
    assert model(**batch).logits is None
    with pytest.raises(ValueError, match="batch_size"):  # which its own forward raises
        model(input_ids=batch["input_ids"], labels=batch["labels"][:, :4])


def test_a_decoder_that_shifts_its_inputs_keeps_its_head():
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=61,
        max_source_positions=8,
        num_mel_bins=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    patched = tw.apply(transformers.WhisperForConditionalGeneration(config))
    assert any(s.kind == "head" and "not the cross entropy" in s.reason for s in patched.skipped)


def test_calls_that_only_the_original_understands(batch):
    model = model_of("Llama")
    tokens = batch["input_ids"]
    everything = torch.arange(9)
    expected = model(**batch).loss
    tw.apply(model)
    torch.testing.assert_close(model(**batch, logits_to_keep=everything).loss, expected)
    torch.testing.assert_close(model(**batch, weight=None, hidden=None).loss, expected)  # it ignores both
    torch.testing.assert_close(model(tokens, None, None, None, None, batch["labels"]).loss, expected)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(tokens, input_ids=tokens, labels=tokens)
    with pytest.raises(TypeError, match="positional arguments"):
        model(*[tokens] * 14)


def test_a_head_of_a_subclass_is_left_alone(batch):
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = model_of("Llama")
    head = Doubled(32, 61, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    patched = tw.apply(model)
    assert "left alone, head: its head is a Doubled, not a torch.nn.Linear: (model)" in str(patched)
    assert model(**batch).logits is not None


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


def test_a_quantised_head_is_left_alone_and_says_so(batch):
    class Quantised(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight = linear.weight

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.bfloat16().to(x.dtype))

    model = model_of("Llama")
    model.lm_head = Quantised(model.lm_head)
    expected = model(**batch).loss
    patched = tw.apply(model)
    assert any(s.kind == "head" and "its head is a Quantised" in s.reason for s in patched.skipped)
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def accelerate():
    """The package without the state that another test, or its Trainer, left in this process."""
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    return module


def test_mixed_precision_of_accelerate_and_the_way_back(batch, accelerate):
    model, original = model_of("Llama"), model_of("Llama")
    patched = tw.apply(model)
    runner = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = runner.prepare(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = original(**batch).loss
    torch.testing.assert_close(prepared(**batch).loss, expected)
    patched.revert()
    torch.testing.assert_close(prepared(**batch).loss, expected)
    bare = runner.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(bare(**batch).loss, original(**batch).loss)


@pytest.mark.slow
def test_a_loop_of_accelerate_with_accumulation_takes_the_same_steps(tmp_path, accelerate):
    rows = torch.randint(3, 61, (12, 9), generator=torch.Generator().manual_seed(2))
    ends = []
    for patch in (False, True):
        model = model_of("Llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if patch:
            tw.apply(model, optimizer=optimizer)
        runner = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        model, optimizer, loader = runner.prepare(model, optimizer, loader)
        updates = 0
        for tokens in loader:
            with runner.accumulate(model):
                # The loss of all tokens of the accumulated batches, as the Trainer scales it.
                runner.backward(3 * model(input_ids=tokens, labels=tokens, num_items_in_batch=3 * 2 * 8).loss)
                if runner.sync_gradients:
                    runner.clip_grad_norm_(model.parameters(), 1.0)
                    updates += 1
                optimizer.step()
                optimizer.zero_grad()
        assert updates == 2
        ends.append(runner.unwrap_model(model).state_dict())
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


def test_attention_is_replaced_in_the_layers_and_not_in_the_configuration(batch, monkeypatch):
    model, seen = model_of("Llama"), []
    theirs = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", lambda *a, **k: seen.append(k["is_causal"]) or theirs(*a, **k)
    )
    other = transformers.LlamaForCausalLM(model.config).train()  # two models of one configuration
    seen.clear()
    patched = tw.apply(model)
    kinds = {(site.name, site.kind) for site in patched.sites}
    assert {("model.layers.0.self_attn", "rope"), ("model.layers.0.self_attn", "attention")} <= kinds
    seen.clear()
    other(**batch)
    assert seen == []
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one(**batch)
        assert seen == [True, True]
        seen.clear()
    mask = torch.ones(2, 9).index_fill(1, torch.tensor([0]), 0)
    torch.testing.assert_close(
        model(**batch, attention_mask=mask).loss, other_loss(model, patched, batch, mask), rtol=1e-4, atol=1e-5
    )
    assert seen == []  # a mask goes to transformers' function
    patched.revert()
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_table_of_attention_functions_is_read_in_every_way():
    table = attention.Functions(transformers.AttentionInterface())
    assert table["sdpa"].func is table.get_interface("sdpa", None).func is attention.attend
    assert table["flex_attention"] is transformers.AttentionInterface()["flex_attention"]
    assert "sdpa" in table
    assert "nothing" not in table
    assert table.valid_keys() == transformers.AttentionInterface().valid_keys()


def other_loss(model, patched, batch, mask):
    with patched.without():
        return model(**batch, attention_mask=mask).loss


def test_attention_by_its_name(batch):
    attention.register()
    expected = model_of("Llama")
    model = transformers.LlamaForCausalLM._from_config(
        copy.deepcopy(expected.config), attn_implementation="tilewright"
    ).train()
    model.load_state_dict(expected.state_dict())
    assert model.config._attn_implementation == "tilewright"
    torch.testing.assert_close(model(**batch).logits, expected(**batch).logits, rtol=1e-4, atol=1e-5)
    patched = tw.apply(model)
    assert any(s.kind == "attention" and "already" in s.reason for s in patched.skipped)
    assert {"rope", "norm"} <= {site.kind for site in patched.sites}


def test_attention_of_another_kind_is_left_alone():
    model = transformers.LlamaForCausalLM._from_config(copy.deepcopy(made("Llama").config), attn_implementation="eager")
    patched = tw.apply(model)
    assert "attention" not in {site.kind for site in patched.sites}
    assert any('attn_implementation="eager"' in s.reason for s in patched.skipped)
