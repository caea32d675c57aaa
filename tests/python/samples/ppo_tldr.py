"""PPO on summaries, as TRL's example script of this name: the runs of its page train with it."""

import shutil

from accelerate import PartialState
from datasets import load_dataset
from rlhf import ModelConfig, PPOConfig, PPOTrainer, ScriptArguments, get_kbit_device_map, get_peft_config, get_quantization_config
from rlhf.trainer.utils import SIMPLE_CHAT_TEMPLATE
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    quantization_config = get_quantization_config(model_args)
    model_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        device_map=get_kbit_device_map() if quantization_config is not None else None,
        quantization_config=quantization_config,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_kwargs)
    peft_config = get_peft_config(model_args)
    ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_kwargs) if peft_config is None else None

    dataset = load_dataset("json", data_files={"train": script_args.dataset_name, "validation": script_args.dataset_name})
    train_dataset = dataset[script_args.dataset_train_split]
    eval_dataset = dataset["validation"]

    def prepare_dataset(dataset, tokenizer):
        """Token ids of the prompts, with their lengths."""

        def tokenize(element):
            input_ids = tokenizer(element["prompt"], padding=False)["input_ids"]
            return {"input_ids": input_ids, "lengths": len(input_ids)}

        return dataset.map(tokenize, remove_columns=dataset.column_names, num_proc=training_args.dataset_num_proc)

    with PartialState().local_main_process_first():
        train_dataset = prepare_dataset(train_dataset, tokenizer)
        eval_dataset = prepare_dataset(eval_dataset, tokenizer)
        # Long prompts are left out.
        train_dataset = train_dataset.filter(lambda row: row["lengths"] <= 512, num_proc=training_args.dataset_num_proc)
        eval_dataset = eval_dataset.filter(lambda row: row["lengths"] <= 512, num_proc=training_args.dataset_num_proc)
    assert train_dataset[0]["input_ids"][-1] != tokenizer.eos_token_id, "a prompt ends with the end of a text"

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()
