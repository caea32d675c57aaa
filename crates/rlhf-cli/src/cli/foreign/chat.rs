//! Flags of DeepSpeed-Chat's three steps of which several decide together, with `--preset deepspeed-chat`.
//!
//! Flags that have the same name and meaning here (`generation_batches`, `enable_ema`, `unsup_coef`, ...) are settings, and not in the
//! table.

use clap::ArgMatches;
use rlhf::model::Dtype;
use rlhf::schema::{Choices as _, Setting as _};

use super::super::args::on_line;
use super::super::errors::Messages;
use super::super::flags;
use super::super::setting::Setting;
use super::line::Line;

/// Appends the settings that the flags of `line` stand for to `settings`; a flag of ours on the command line still wins. Returns a setting
/// that wins over it.
pub(super) fn translate(line: &Line<'_>, settings: &mut Vec<Setting>, messages: &mut Messages) -> Option<Setting> {
    let flags = line.flags;
    let is_set = |name: &str| {
        line.find(name).is_some() || line.on_line(name) || settings.iter().any(|setting| setting.key == name)
    };
    let (adapter_settings, forced) = adapters(line, is_set, messages);
    let has_adapters = adapter_settings.iter().any(|(_, key, _)| *key == "lora_alpha");
    for (name, key, value) in adapter_settings.into_iter().chain(switches(line)) {
        line.set(&name, Setting::new(key, vec![value]), settings, &mut messages.refusals);
    }
    // At the front, so that any other value of the setting wins.
    let default = |settings: &mut Vec<Setting>, key: &str, value: &str| {
        settings.insert(0, Setting::new(key, vec![value.into()]));
    };
    if line.find("actor_weight_decay").is_some() {
        // The critic's weight decay is 0 in DeepSpeed-Chat unless it is set.
        default(settings, "value_weight_decay", "0");
    }
    if has_adapters {
        // DeepSpeed-Chat's adapters have no dropout, unlike TRL's.
        default(settings, "lora_dropout", "0");
    }
    // DeepSpeed-Chat computes in the dtype of its models.
    match dtype(flags, settings) {
        Some(Dtype::BFloat16) => default(settings, "bf16", "true"),
        Some(Dtype::Float16) if flags.ids().any(|id| id == "fp16") => default(settings, "fp16", "true"),
        _ => {}
    }
    if is_fp16(flags, settings) {
        // DeepSpeed-Chat's engine configuration has another window than DeepSpeed's default.
        default(settings, "loss_scale_window", "100");
    }
    // A value that is not accepted is refused already.
    forced.filter(|setting| line.unaccepted(&setting.key, &setting.values).is_none())
}

/// Returns the last value of a setting.
fn last<'s>(settings: &'s [Setting], key: &str) -> Option<&'s String> {
    settings.iter().rev().find(|setting| setting.key == key).and_then(|setting| setting.values.first())
}

/// Returns the `dtype` of the models.
fn dtype(flags: &ArgMatches, settings: &[Setting]) -> Option<Dtype> {
    match (on_line(flags, "dtype"), last(settings, "dtype")) {
        (false, Some(name)) => Dtype::named(name),
        _ => flags::text(flags, "dtype").and_then(Dtype::named),
    }
}

/// Returns whether `fp16` is set.
fn is_fp16(flags: &ArgMatches, settings: &[Setting]) -> bool {
    match (on_line(flags, "fp16"), last(settings, "fp16")) {
        (false, Some(value)) => value.eq_ignore_ascii_case("true"),
        _ => flags::text(flags, "fp16").and_then(bool::read) == Some(true),
    }
}

/// Prefix of a model's flags, and our settings of its adapters and of its learning rate.
type ModelFlags = (&'static str, [&'static str; 4]);

const POLICY: [&str; 4] = ["use_peft", "lora_r", "lora_target_modules", "learning_rate"];
const CRITIC: [&str; 4] = ["value_use_peft", "value_lora_r", "value_lora_target_modules", "value_learning_rate"];

/// A flag of DeepSpeed-Chat, our setting that it sets, and the value.
type Translation = (String, &'static str, String);

/// Translates adapters and learning rates. A model with adapters trains with the adapters' learning rate, and another one that `is_set`
/// for it has no effect, which is noted. Returns that of adapters where it wins over the command line.
fn adapters(
    line: &Line<'_>,
    is_set: impl Fn(&str) -> bool,
    messages: &mut Messages,
) -> (Vec<Translation>, Option<Setting>) {
    let Messages { refusals, notes } = messages;
    let is_ppo = line.command.get_name() == "ppo";
    let models: &[ModelFlags] = if is_ppo { &[("actor_", POLICY), ("critic_", CRITIC)] } else { &[("", POLICY)] };
    let flag_value =
        |prefix: &str, flag: &str| line.find(&format!("{prefix}{flag}")).and_then(|foreign| foreign.values.first());
    let adapters_alone = is_on(line, "only_optimize_lora");
    let mut settings: Vec<Translation> = Vec::new();
    let mut forced = None;
    for (prefix, [peft, r, targets, rate]) in models {
        let rank_flag = format!("{prefix}lora_dim");
        let rank = flag_value(prefix, "lora_dim").map_or(Ok(0), |word| word.parse::<usize>().map_err(|_| word));
        let rank = rank.unwrap_or_else(|word| {
            refusals.say(&rank_flag, format!("{rank_flag} = {word}: expected a whole number, 0 or more"));
            0
        });
        if rank > 0 && !adapters_alone {
            let message = format!(
                "{rank_flag} = {rank} without only_optimize_lora = true trains embeddings, biases and norms beside the adapters, which \
                 is not supported: set only_optimize_lora, or {rank_flag} = 0"
            );
            refusals.say(&rank_flag, message);
        }
        let value_or = |flag: &str, default: &str| flag_value(prefix, flag).map_or(default, String::as_str).to_string();
        let rate_flag = format!("{prefix}learning_rate");
        if rank == 0 {
            if let Some(value) = flag_value(prefix, "learning_rate") {
                settings.push((rate_flag, *rate, value.clone()));
            }
            continue;
        }
        let lora_rate = value_or("lora_learning_rate", "5e-4");
        if is_set(&rate_flag) {
            notes.push(format!(
                "{rate_flag} has no effect beside adapters: {prefix}lora_learning_rate is their rate, {lora_rate}"
            ));
            // The flag has the name of our setting.
            if rate_flag == *rate {
                forced = Some(Setting::new(rate, vec![lora_rate.clone()]));
            }
        }
        if !settings.iter().any(|(_, key, _)| *key == "lora_alpha") {
            // DeepSpeed-Chat scales an adapter's product by 1 / rank.
            settings.push((rank_flag.clone(), "lora_alpha", "1".into()));
        }
        // A default has the place of the rank, by which it applies.
        let source = |flag: &str| flag_value(prefix, flag).map_or(rank_flag.clone(), |_| format!("{prefix}{flag}"));
        let (targets_flag, lora_rate_flag) = (source("lora_module_name"), source("lora_learning_rate"));
        settings.extend([
            (rank_flag.clone(), *peft, "true".to_string()),
            (rank_flag.clone(), *r, rank.to_string()),
            (targets_flag, *targets, value_or("lora_module_name", "decoder.layers.")),
            (lora_rate_flag, *rate, lora_rate),
        ]);
    }
    let is_set = |key: &str| settings.iter().any(|(_, other, _)| *other == key);
    if is_ppo && is_set(POLICY[0]) && !is_set(CRITIC[0]) {
        settings.push(("actor_lora_dim".into(), CRITIC[0], "false".into()));
    }
    (settings, forced)
}

fn is_on(line: &Line<'_>, name: &str) -> bool {
    let word = line.find(name).and_then(|foreign| foreign.values.first());
    word.is_some_and(|word| word.eq_ignore_ascii_case("true"))
}

/// Translates `enable_tensorboard` and `eval_interval`.
fn switches(line: &Line<'_>) -> Vec<Translation> {
    let mut settings = Vec::new();
    if is_on(line, "enable_tensorboard") {
        settings.push(("enable_tensorboard".into(), "report_to", "tensorboard".into()));
    }
    let interval = line.find("eval_interval").and_then(|foreign| foreign.values.first());
    if let Some(interval) = interval.filter(|word| *word != "0") {
        settings.push(("eval_interval".into(), "eval_steps", interval.clone()));
    }
    settings
}

#[cfg(test)]
mod tests {
    use rlhf::settings::{PpoConfig, Preset, ReportTo};

    use crate::cli::Task;
    use crate::cli::testing::{parse_words, parsed, ppo_error, with_file};

    /// Parses a command line of the preset.
    fn chat(words: &str) -> Result<Task, String> {
        let line = "ppo --preset deepspeed-chat --actor_model_name_or_path a --critic_model_name_or_path c --data_path d \
                    --output_dir o";
        parse_words(&line.split_whitespace().chain(words.split_whitespace()).collect::<Vec<_>>())
    }

    #[track_caller]
    fn read(words: &str) -> PpoConfig {
        match chat(words).unwrap() {
            Task::Ppo(config) => config,
            task => panic!("not ppo: {task:?}"),
        }
    }

    #[test]
    fn flags_of_deepspeed_chat_are_other_names_of_ours_with_its_preset() {
        assert_eq!(read(""), PpoConfig::with_preset(Preset::DeepspeedChat, "a", "c", "d", "o"));
        let config = read(
            "--deepspeed --per_device_generation_batch_size 8 --per_device_training_batch_size 4 --generation_batches 2 \
             --ppo_epochs 2 --max_answer_seq_len 64 --max_prompt_seq_len 128 --actor_learning_rate 1e-5 \
             --critic_learning_rate 2e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.2 --num_warmup_steps 7 \
             --num_padding_at_beginning 1 --actor_dropout 0.0 --inference_tp_size 1 --actor_zero_stage 0 --offload false \
             --enable_ema --actor_gradient_checkpointing --enable_tensorboard --compute_fp32_loss --local_rank -1 --seed 1234 \
             --unsupervised_dataset_name texts --unsup_coef 20 --print_answers --enable_test_mode --test_stop_step 3 \
             --enable_hybrid_engine --unpin_actor_parameters --release_inference_cache --tp_gather_partition_size 4",
        );
        let plan = config.plan(100).unwrap();
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, config.num_ppo_epochs), (16, 4, 2));
        assert_eq!((config.response_length, config.prompt_length.max_prompt_length), (64, Some(128)));
        assert_eq!((config.learning_rate, config.value_optimizer().0), (1e-5, 2e-6));
        let decays = |config: &PpoConfig| (config.optimizer.weight_decay, config.value_optimizer().1.weight_decay);
        assert_eq!(decays(&config), (0.1, 0.2));
        // The actor's weight decay is not the critic's, which is 0 unless it is set.
        assert_eq!(decays(&read("--actor_weight_decay 0.1")), (0.1, 0.0));
        assert_eq!(decays(&read("--critic_weight_decay 0.2")), (0.0, 0.2));
        assert_eq!(decays(&read("--actor_weight_decay 0.1 --value_weight_decay 0.3")), (0.1, 0.3));
        assert_eq!((config.optimizer.warmup_steps, config.run.gradient_checkpointing), (7, true));
        assert_eq!(config.run.tracking.report_to, [ReportTo::Tensorboard]);
        assert_eq!((config.ema.enable_ema, config.run.seed), (true, 1234));
        assert_eq!((config.peft.use_peft, config.value_lora()), (false, None));
        let window = |words: &str| (read(words).run.fp16, read(words).run.loss_scale.loss_scale_window);
        for (words, expected) in [
            ("--dtype fp16", (true, 100)),
            ("--fp16", (true, 100)),
            ("--fp16 --loss_scale_window 7", (true, 7)),
            ("--dtype fp16 --fp16=false", (false, 1000)),
            ("--bf16", (false, 1000)),
        ] {
            assert_eq!(window(words), expected, "{words}");
        }
        let config = read("--actor_lora_dim 8 --only_optimize_lora --actor_lora_learning_rate 1e-3");
        let lora = config.peft.lora().unwrap();
        assert_eq!((lora.r, lora.alpha, lora.target_modules), (8, 1.0, Some(vec!["decoder.layers.".into()])));
        assert_eq!((config.learning_rate, config.value_lora(), config.value_optimizer().0), (1e-3, None, 5e-6));
        let config = read("--critic_lora_dim 4 --critic_lora_module_name layers. --only_optimize_lora --dtype bf16");
        assert_eq!((config.peft.use_peft, config.value_lora().unwrap().r, config.run.bf16), (false, 4, true));
        assert_eq!((config.value_optimizer().0, config.learning_rate), (5e-4, 9.65e-6));
    }

    #[test]
    fn flags_of_deepspeed_chat_with_an_unsupported_value_or_another_preset_are_refused() {
        for (words, message) in [
            ("--inference_tp_size 8", "inference_tp_size = 8: each rank generates by itself"),
            ("--actor_dropout 0.1", "actor_dropout = 0.1: a model's own dropout is not applied here"),
            ("--actor_lora_dim 8", "actor_lora_dim = 8 without only_optimize_lora = true trains embeddings"),
            ("--critic_lora_dim x", "critic_lora_dim = x: expected a whole number"),
            (
                "--max_answer_seq_len 9 --response_length 8",
                "max_answer_seq_len and response_length are the same setting: give one",
            ),
        ] {
            let error = chat(words).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
        assert_eq!(
            ppo_error(&["--max_answer_seq_len", "2"]),
            "max_answer_seq_len is a flag of --preset deepspeed-chat; with other presets use response_length"
        );
    }

    #[test]
    fn command_lines_of_the_first_two_steps_are_ours_with_the_preset() {
        // Flags of DeepSpeed-Chat's own scripts.
        let both = "--model_name_or_path m --data_path d e --per_device_train_batch_size 4 --per_device_eval_batch_size 4 \
                    --max_seq_len 128 --weight_decay 0.1 --num_train_epochs 2 --gradient_accumulation_steps 2 \
                    --lr_scheduler_type cosine --num_warmup_steps 7 --seed 9 --gradient_checkpointing --dropout 0.0 \
                    --zero_stage 0 --offload --deepspeed --enable_tensorboard --tensorboard_path t --data_output_path x \
                    --local_rank -1 --compute_fp32_loss --output_dir o --dtype bf16";
        let words = |command: &'static str, more: &'static str| {
            let more = more.split_whitespace();
            [command, "--preset", "deepspeed-chat"]
                .into_iter()
                .chain(both.split_whitespace())
                .chain(more)
                .collect::<Vec<_>>()
        };
        let Task::Sft(sft) = parse_words(&words("sft", "--print_loss --learning_rate 3e-4")).unwrap() else { panic!() };
        assert_eq!((sft.data.dataset_name.len(), sft.max_length, sft.optimizer.warmup_steps), (2, Some(128), 7));
        assert_eq!((sft.learning_rate, sft.optimizer.weight_decay, sft.plan(16).unwrap().num_updates), (3e-4, 0.1, 4));
        assert_eq!((sft.completion_only_loss, sft.run.bf16, sft.run.offload.offloads_optimizer()), (false, true, true));
        assert_eq!((sft.run.tracking.report_to.as_slice(), sft.run.seed), (&[ReportTo::Tensorboard][..], 9));
        let more = "--eval_interval 5 --eval_iters 3 --num_padding_at_beginning 0 --lora_dim 8 --only_optimize_lora \
                   --lora_module_name layers.";
        let Task::Reward(reward) = parse_words(&words("reward", more)).unwrap() else { panic!() };
        assert_eq!((reward.eval.eval_steps, reward.num_padding_at_beginning), (Some(5.into()), Some(0)));
        assert_eq!((reward.peft.use_peft, reward.peft.lora_r, reward.learning_rate), (true, 8, 5e-4));
        assert_eq!((reward.peft.lora_alpha, reward.new_reward_head), (1, true));
        assert_eq!(reward.peft.lora_dropout, 0.0);
        for (command, more, message) in [
            ("sft", "--lora_dim 8", "lora_dim = 8 without only_optimize_lora = true trains embeddings"),
            ("sft", "--sft_only_data_path f", "sft_only_data_path = f: no dataset is kept from data_split"),
            ("sft", "--dropout 0.1", "dropout = 0.1: a model's own dropout is not applied here"),
            ("reward", "--add_eot_token", "add_eot_token = true: a token that the tokenizer lacks is not added"),
        ] {
            let error = parse_words(&words(command, more)).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        // In the script with adapters alone the learning rate is of no weight.
        let more = "--lora_dim 128 --only_optimize_lora --learning_rate 1e-3";
        let parsed = parsed(&words("sft", more)).unwrap();
        let Task::Sft(sft) = parsed.task else { panic!() };
        assert_eq!((sft.learning_rate, sft.peft.lora_r), (5e-4, 128));
        let note = "learning_rate has no effect beside adapters: lora_learning_rate is their rate, 5e-4";
        assert!(parsed.notes.iter().any(|other| other == note), "{:?}", parsed.notes);
        let more = "--lora_dim 128 --only_optimize_lora --learning_rate 1e-3 --lora_learning_rate 2e-4";
        let Task::Sft(sft) = parse_words(&words("sft", more)).unwrap() else { panic!() };
        assert_eq!((sft.learning_rate, sft.peft.lora_dropout), (2e-4, 0.0));
        // Adapters of our own flags have our dropout, and a dropout that is given is the one.
        for (more, dropout) in [("--use_peft", 0.05), ("--lora_dim 8 --only_optimize_lora --lora_dropout 0.3", 0.3)] {
            let Task::Sft(sft) = parse_words(&words("sft", more)).unwrap() else { panic!() };
            assert_eq!(sft.peft.lora_dropout, dropout, "{more}");
        }
        let error = parse_words(&["reward", "--preset", "grpo", "--model_name_or_path", "m"]).unwrap_err();
        assert!(error.contains("invalid value 'grpo' for '--preset <NAME>'"), "{error}");
        let plain =
            ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", "--max_seq_len", "9"];
        assert_eq!(
            parse_words(&plain).unwrap_err(),
            "max_seq_len is a flag of --preset deepspeed-chat; with other presets use max_length"
        );
    }

    #[test]
    fn the_offload_flags_of_deepspeed_chat_are_parts_of_ours() {
        for (words, expected) in [
            ("--offload", [true, false]),
            ("--offload false", [false, false]),
            ("--offload --offload_reference_model", [true, true]),
            ("--offload_reward_model", [false, true]),
            ("--offload_reference_model=false --offload optimizer models", [true, true]),
        ] {
            let offload = read(words).run.offload;
            assert_eq!([offload.offloads_optimizer(), offload.offloads_models()], expected, "{words}");
        }
    }

    #[test]
    fn errors_about_names_of_deepspeed_chat_in_a_file_have_its_line_and_its_names() {
        let text = "preset: deepspeed-chat\nactor_model_name_or_path: a\ncritic_model_name_or_path: c\ndata_path: d\n\
                    actor_dropout: 0.1\nmax_answer_seq_len: 0\nonly_optimize_lora: true\nactor_lora_dim: 4\n\
                    critic_learning_rate: -1\n";
        let error = with_file(text, &["ppo", "--output_dir", "o"]).unwrap_err();
        let starts = [
            "run.yaml:5: actor_dropout = 0.1: a model's own dropout is not applied here; expected none or 0 or 0.0",
            "run.yaml:6: max_answer_seq_len = 0: expected at least 1",
            "run.yaml:9: critic_learning_rate = -1: expected a number",
        ];
        for start in starts {
            assert!(error.lines().any(|line| line.starts_with(start)), "{start}\n{error}");
        }
        let many = text.replace("max_answer_seq_len: 0", "seed: 1").replace("lora_dim: 4", "lora_dim: 99999");
        let error = with_file(&many, &["ppo", "--output_dir", "o"]).unwrap_err();
        let start = "run.yaml:8: actor_lora_dim = 99999: expected at most 65536";
        assert!(error.lines().any(|line| line.starts_with(start)), "{error}");
        let section: String = text.lines().map(|line| format!(" {line}\n")).collect();
        let text = format!("model_name_or_path: m\ndataset_name: d\noutput_dir: o\nppo:\n{section}");
        let error = with_file(&text, &["pipeline"]).unwrap_err();
        for start in ["run.yaml:9: ppo: actor_dropout = 0.1: ", "run.yaml:10: ppo: max_answer_seq_len = 0: "] {
            assert!(error.lines().any(|line| line.starts_with(start)), "{start}\n{error}");
        }
        let text = "actor_learning_rate: 1\n";
        let error = with_file(text, &crate::cli::testing::PPO).unwrap_err();
        assert!(
            error.starts_with("run.yaml:1: actor_learning_rate is a flag of --preset deepspeed-chat only"),
            "{error}"
        );
    }

    #[test]
    fn a_malformed_value_of_a_name_of_deepspeed_chat_has_its_name_and_its_line() {
        let text = "preset: deepspeed-chat\nactor_model_name_or_path: a\ncritic_model_name_or_path: c\ndata_path: d\n\
                    max_answer_seq_len: long\nactor_learning_rate: fast\nonly_optimize_lora: true\ncritic_lora_dim: 4\n\
                    critic_lora_learning_rate: slow\n";
        let error = with_file(text, &["ppo", "--output_dir", "o"]).unwrap_err();
        let expected = [
            "run.yaml:5: max_answer_seq_len = long: expected a whole number, 0 or more",
            "run.yaml:6: actor_learning_rate = fast: expected a number",
            "run.yaml:9: critic_lora_learning_rate = slow: expected a number",
        ];
        assert_eq!(error.lines().collect::<Vec<_>>(), expected);
        let section: String = text.lines().map(|line| format!(" {line}\n")).collect();
        let text = format!("model_name_or_path: m\ndataset_name: d\noutput_dir: o\nppo:\n{section}");
        let error = with_file(&text, &["pipeline"]).unwrap_err();
        let expected = "run.yaml:9: ppo: max_answer_seq_len = long: expected a whole number, 0 or more";
        assert!(error.lines().any(|line| line == expected), "{error}");
        let error = chat("--max_answer_seq_len long").unwrap_err();
        assert_eq!(error, "max_answer_seq_len = long: expected a whole number, 0 or more");
        let words =
            "reward --preset deepspeed-chat --model_name_or_path m --data_path d --output_dir o --eval_interval often";
        let error = parse_words(&words.split_whitespace().collect::<Vec<_>>()).unwrap_err();
        assert_eq!(error, "eval_interval = often: expected a whole number of updates, or epoch");
        // The rate of adapters, which wins over a flag of ours.
        let words = "sft --preset deepspeed-chat --model_name_or_path m --data_path d --output_dir o --lora_dim 8 \
                     --only_optimize_lora --learning_rate 1e-3 --lora_learning_rate slow";
        let error = parse_words(&words.split_whitespace().collect::<Vec<_>>()).unwrap_err();
        assert_eq!(error, "lora_learning_rate = slow: expected a number");
    }

    #[test]
    fn flags_of_deepspeed_chat_are_keys_of_a_file_and_the_command_line_wins() {
        let text = "preset: deepspeed-chat\nactor_model_name_or_path: a\ncritic_model_name_or_path: c\ndata_path: [d, e]\n\
                    ppo_epochs: 3\noffload: false\nmax_answer_seq_len: 9\n";
        let words = ["ppo", "--output_dir", "o", "--max_answer_seq_len", "11"];
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        assert_eq!((config.num_ppo_epochs, config.response_length, config.data.dataset_name.len()), (3, 11, 2));
        // Both names of a setting may have the same value.
        let same = with_file(&format!("{text}response_length: 9\n"), &["ppo", "--output_dir", "o"]);
        assert!(same.is_ok(), "{same:?}");
        let other = with_file(&format!("{text}response_length: 10\n"), &["ppo", "--output_dir", "o"]).unwrap_err();
        let expected = "run.yaml:7: max_answer_seq_len and response_length are the same setting: give one of them";
        assert_eq!(other, expected);
    }
}
