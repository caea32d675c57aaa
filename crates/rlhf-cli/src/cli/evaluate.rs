//! `rlhf eval`: evaluates, and prints a table, or the summary as one JSON object where a program reads.

use std::io::{self, Write};

use comfy_table::{ContentArrangement, Table, presets};
use rlhf::eval::{Comparison, ScoreSummary, SideSummary, Summary};
use rlhf::run::Console;
use rlhf::safe_text::one_line;
use rlhf::settings::EvaluateConfig;
use rlhf::terminal::{Stream, wrap};
use rlhf::{Error, Result};

/// Evaluates, and prints the summary on standard output.
pub(crate) fn evaluate(config: &EvaluateConfig, console: Console) -> Result<()> {
    let summary = rlhf::eval::evaluate(config, console)?;
    let text = match console {
        Console::Person => shown(&summary, config),
        _ => serde_json::to_string(&summary).map_err(|e| Error::Run(format!("the summary: {e}")))?,
    };
    writeln!(io::stdout(), "{text}").map_err(Error::io("write to", "standard output"))
}

/// Returns the summary as a table, with the counts and the place of the files below it.
fn shown(summary: &Summary, config: &EvaluateConfig) -> String {
    let width = Stream::Out.width();
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    width.map(|width| table.set_width(width.min(usize::from(u16::MAX)) as u16));
    let sides: Vec<&SideSummary> = std::iter::once(&summary.a).chain(&summary.b).collect();
    let row = |name: &str, cells: Vec<String>| std::iter::once(name.to_string()).chain(cells).collect::<Vec<_>>();
    table.set_header(row("", sides.iter().map(|side| one_line(&side.name).into_owned()).collect()));
    if let Some(comparison) = &summary.comparison {
        for (name, cells) in win_rates(comparison) {
            table.add_row(row(name, cells));
        }
    }
    let scores: Vec<&ScoreSummary> = sides.iter().filter_map(|side| side.scores.as_ref()).collect();
    if scores.len() == sides.len() {
        let cell = |s: &&ScoreSummary| with_interval(&format!("{:.4}", s.mean_score), s.mean_score_interval, 1.0, 4);
        table.add_row(row("mean score", scores.iter().map(cell).collect()));
        if scores.iter().all(|scores| scores.share_right.is_some()) {
            let cell = |s: &&ScoreSummary| s.share_right.map_or(String::new(), percent);
            table.add_row(row("right", scores.iter().map(cell).collect()));
        }
        for k in scores[0].pass_at_k.keys() {
            let cell = |s: &&ScoreSummary| s.pass_at_k.get(k).map_or(String::new(), |share| percent(*share));
            table.add_row(row(&format!("pass@{k}"), scores.iter().map(cell).collect()));
        }
    }
    table.add_row(row("mean length", sides.iter().map(|side| format!("{:.0} characters", side.mean_length)).collect()));
    let counts = wrap(&one_line(&counts(summary)), width, 2);
    let place = wrap(&one_line(&format!("results in {}", config.output_dir.display())), width, 2);
    format!("{table}\n{counts}\n{place}")
}

/// Returns the rows of the win rates of both sides.
fn win_rates(comparison: &Comparison) -> Vec<(&'static str, Vec<String>)> {
    let both_sides = |rate: f64, interval: Option<[f64; 2]>| {
        let opposite = interval.map(|[low, high]| [1.0 - high, 1.0 - low]);
        let cell = |(rate, interval)| with_interval(&percent(rate), interval, 100.0, 1);
        [(rate, interval), (1.0 - rate, opposite)].map(cell).to_vec()
    };
    let controlled = match comparison.length_controlled_win_rate {
        Some(rate) => both_sides(rate, comparison.length_controlled_interval),
        None => vec!["no finite fit".into(), String::new()],
    };
    vec![
        ("win rate", both_sides(comparison.win_rate, Some(comparison.win_rate_interval))),
        ("win rate at equal length", controlled),
    ]
}

/// Returns what was counted, in one line.
fn counts(summary: &Summary) -> String {
    let mut text = format!("{} prompts, judged by {}", summary.prompts, summary.judge);
    if let Some(comparison) = &summary.comparison {
        let Comparison { wins, ties, losses, .. } = comparison;
        text += &format!(": {} wins {wins}, loses {losses}, ties {ties}", summary.a.name);
        if comparison.inconsistent > 0 {
            text += &format!(" ({} as the verdict depends on the order)", comparison.inconsistent);
        }
    }
    text += "; 95 % intervals in brackets";
    if summary.no_verdict > 0 {
        text += &format!("; {} without a verdict", summary.no_verdict);
    }
    if summary.left_out > 0 {
        text += &format!("; {} prompts left out by max_judgements", summary.left_out);
    }
    text
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Returns `text` with its interval, if it has one, scaled by `factor`, in brackets.
fn with_interval(text: &str, interval: Option<[f64; 2]>, factor: f64, digits: usize) -> String {
    let shown = |[low, high]: [f64; 2]| format!("{text} ({:.digits$} to {:.digits$})", factor * low, factor * high);
    interval.map_or(text.to_string(), shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_both_sides_and_what_was_counted() {
        let scores = |mean_score| ScoreSummary {
            mean_score,
            mean_score_interval: Some([mean_score - 0.5, mean_score + 0.5]),
            share_right: None,
            pass_at_k: [(1, 0.25)].into(),
        };
        let side = |name: &str, mean| SideSummary { name: name.into(), mean_length: 12.4, scores: Some(scores(mean)) };
        let summary = Summary {
            judge: "model: `runs/reward`".into(),
            prompts: 40,
            left_out: 2,
            responses_per_prompt: 1,
            no_verdict: 1,
            comparison: Some(Comparison {
                wins: 20,
                ties: 10,
                losses: 10,
                inconsistent: 0,
                win_rate: 0.625,
                win_rate_interval: [0.5, 0.75],
                length_controlled_win_rate: None,
                length_controlled_interval: None,
            }),
            a: side("runs/ppo\u{1b}[2J", 1.5),
            b: Some(side("runs/sft", -0.25)),
        };
        let text = shown(&summary, &EvaluateConfig::new("runs/ppo", "d", "runs/eval"));
        for words in [
            "62.5 % (50.0 to 75.0)",
            "37.5 % (25.0 to 50.0)",
            "no finite fit",
            "1.5000 (1.0000 to 2.0000)",
            "pass@1",
            "25.0 %",
            "12 characters",
            "40 prompts, judged by model: `runs/reward`: runs/ppo\\u{1b}[2J wins 20, loses 10, ties 10; \
             95 % intervals in brackets; 1 without a verdict; 2 prompts left out",
            "results in runs/eval",
        ] {
            assert!(text.contains(words), "no `{words}` in {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
