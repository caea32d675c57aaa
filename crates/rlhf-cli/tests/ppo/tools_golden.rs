//! Runs of TRL 1.16's GRPOTrainer with tools and environments (`tests/golden/trl_tools`): its turns, results, rewards and order of rows
//! are injected, everything else is computed here. And GAE across results of tools (`tests/golden/gae_across_tools.json`).

use super::groups_golden::{Run, compare, compare_all, compare_updates, golden_runs, sums_over_micro_batches};
use crate::support::{Tensors, chosen_golden, read_json};
use rlhf::rl::math::{self, Lambda};
use serde_json::Value;
use tch::{Kind, Tensor};

fn runs() -> impl Iterator<Item = Run> {
    golden_runs("trl_tools").into_iter().map(|dir| Run::read(&dir))
}

#[test]
fn every_golden_run_with_tools_is_reproduced_to_the_weights() {
    compare_all(compare, runs());
}

#[test]
fn updates_with_tools_are_those_of_trl_where_its_losses_do_not_depend_on_micro_batches() {
    compare_all(compare_updates, runs().filter(sums_over_micro_batches));
}

/// The ids of a list of numbers.
fn ids(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

#[test]
fn sampled_turns_and_encoded_results_make_the_recorded_rows() {
    for dir in golden_runs("trl_tools") {
        let (info, data) = (read_json(&dir.join("info.json")), Tensors::read(&dir.join("data.safetensors")));
        let most = info["args"]["max_completion_length"].as_u64().unwrap() as usize;
        for (generation, rows) in info["rollouts"].as_array().unwrap().iter().enumerate() {
            let completions = data.rows(&format!("it{generation}.completion_ids"));
            let masks = data.rows(&format!("it{generation}.tool_mask"));
            let lengths = data.get(&format!("it{generation}.lengths"));
            for (row, found) in rows.as_array().unwrap().iter().enumerate() {
                let (mut tokens, mut sampled) = (Vec::new(), Vec::new());
                for turn in found["turns"].as_array().unwrap() {
                    for (part, flag) in [("sampled", 1), ("suffix", 0)] {
                        let part = turn.get(part).map(ids).unwrap_or_default();
                        sampled.extend(vec![flag; part.len()]);
                        tokens.extend(part);
                    }
                }
                // The last turn may be longer than what is left of the budget.
                tokens.truncate(most);
                sampled.truncate(most);
                let what = format!("{}: generation {generation}, row {row}", dir.display());
                assert_eq!(tokens.len() as i64, lengths.int64_value(&[row as i64]), "{what}: length");
                assert_eq!(tokens[..], completions[row][..tokens.len()], "{what}: ids");
                assert_eq!(sampled[..], masks[row][..tokens.len()], "{what}: mask");
            }
        }
    }
}

#[test]
fn gae_carries_value_and_accumulator_across_results_of_tools() {
    for (number, case) in
        read_json(&chosen_golden().join("gae_across_tools.json")).as_array().unwrap().iter().enumerate()
    {
        let row = |name: &str| {
            let numbers: Vec<f64> = case[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            Tensor::from_slice(&numbers).to_kind(Kind::Float).unsqueeze(0)
        };
        let [gamma, lam] = ["gamma", "lam"].map(|name| case[name].as_f64().unwrap());
        let mask = row("mask").to_kind(Kind::Bool);
        // Values of tokens that were not sampled are no part of the estimate.
        let (advantages, returns) = math::gae_across(
            &row("rewards"),
            &row("values"),
            &mask,
            Some(&mask.logical_not()),
            gamma,
            &Lambda::Fixed(lam),
        );
        for (name, found) in [("advantages", advantages), ("returns", returns)] {
            let gap = (found - row(name)).abs().max().double_value(&[]);
            assert!(gap < 1e-5, "case {number}: {name}: {gap:e}");
        }
    }
}
