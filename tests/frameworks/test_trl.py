"""trl and peft: the SFTTrainer over a tiny Llama with LoRA, both made from configurations."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from frameworks import loader_ways

pytestmark = pytest.mark.usefixtures("forget_accelerates_state")

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh"]
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def tokenizer():
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def texts(count):
    """Of different lengths."""
    return Dataset.from_dict({"text": [" ".join("abcdefgh"[: 2 + index % 7]) for index in range(count)]})


def options(folder, workers, **others):
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": workers,
        "save_strategy": "no",
        **others,
    }


def outcome(trainer):
    kept = ("loss", "grad_norm", "eval_loss", "step")
    history = [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history]
    changed = [p.tolist() for name, p in trainer.model.named_parameters() if "lora" in name]
    assert changed
    return [history, changed]


def tuning(folder, workers, **others):
    return SFTTrainer(
        tiny_llama(),
        SFTConfig(**options(folder, workers, **others)),
        train_dataset=texts(18),
        eval_dataset=texts(7),
        processing_class=tokenizer(),
        peft_config=LORA,
    )


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
def test_fine_tuning(compare, tmp_path, workers):
    def program(way):  # noqa: ARG001
        trainer = tuning(tmp_path, workers, eval_strategy="epoch")
        trainer.train()
        return outcome(trainer)

    ours = compare(program, workers=workers)
    assert len(ours.reports) >= 2


@loader_ways.INSTALL_ONLY
def test_going_on_from_a_checkpoint(compare, tmp_path):
    def program(way):
        folder = tmp_path / way.name
        saving = {"save_strategy": "steps", "save_steps": 3}
        whole = tuning(folder, 2, **saving)
        whole.train()
        resumed = tuning(folder, 2, **saving)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        found = outcome(resumed)
        assert found == outcome(whole)
        return found

    compare(program)


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
def test_preferences(compare, tmp_path, workers):
    pairs = Dataset.from_dict(
        {
            "prompt": ["a b"] * 10,
            "chosen": [" c d"[: 2 + 2 * (index % 2)] for index in range(10)],
            "rejected": [" e f g"] * 10,
        }
    )

    def program(way):  # noqa: ARG001
        trainer = DPOTrainer(
            tiny_llama(),
            args=DPOConfig(**options(tmp_path, workers)),
            train_dataset=pairs,
            processing_class=tokenizer(),
            peft_config=LORA,
        )
        trainer.train()
        return outcome(trainer)

    compare(program, workers=workers)
