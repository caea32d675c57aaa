//! The plan as text.

use super::{Phase, PipelinePlan, Plan, PlannedMicroBatch, PlannedModel};
use crate::terminal::about;
use std::fmt::Write;
use std::time::Duration;

/// Most changes that are shown.
const MOST_CHANGES: usize = 8;

/// A size in GiB or MiB.
pub(super) fn size(bytes: usize) -> String {
    match bytes as f64 / (1u64 << 20) as f64 {
        mib if mib < 999.5 => format!("{mib:.0} MiB"),
        mib if mib < 10.0 * 1024.0 => format!("{:.2} GiB", mib / 1024.0),
        mib => format!("{:.1} GiB", mib / 1024.0),
    }
}

/// A size in a table.
fn or_dash(bytes: usize) -> String {
    if bytes == 0 { "-".into() } else { size(bytes) }
}

/// A count with its magnitude.
fn count(number: f64) -> String {
    let units = [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.iter().find(|(unit, _)| number >= *unit) {
        Some((unit, name)) => format!("{:.3}{name}", number / unit),
        None => format!("{number:.0}"),
    }
}

/// A positive number in three significant digits, however small it is.
fn three_digits(number: f64) -> String {
    let decimals = if number > 0.0 { (2 - number.log10().floor() as i32).clamp(0, 9) } else { 0 };
    format!("{number:.*}", decimals as usize)
}

/// Lines of cells in columns: the first is aligned left, the others right.
fn columns(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(text, "  {}", line.trim_end());
    }
    text
}

fn words(cells: &[&str]) -> Vec<String> {
    cells.iter().map(ToString::to_string).collect()
}

/// The whole text.
pub(super) fn of(plan: &Plan) -> String {
    let ranks = if plan.ranks > 1 { format!(", each of {} ranks", plan.ranks) } else { String::new() };
    let mut text = format!("plan of rlhf {} ({}, {}{ranks})\n\n", plan.command, plan.device, plan.precision);
    text += &models(&plan.models);
    text += "\n";
    text += &phases(&plan.memory.phases);
    text += "\n";
    text += &verdict(plan);
    text += &work(plan);
    for note in &plan.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn models(models: &[PlannedModel]) -> String {
    let mut rows = vec![words(&["model", "parameters", "trained", "weights", "gradients", "moments"])];
    rows.extend(models.iter().map(|model| {
        vec![
            model.role.name().to_string(),
            count(model.parameters as f64),
            count(model.trained as f64),
            or_dash(model.weights),
            or_dash(model.gradients),
            or_dash(model.moments),
        ]
    }));
    columns(&rows)
}

fn phases(phases: &[Phase]) -> String {
    let names = ["phase", "program", "weights", "gradients", "moments", "activations", "cache", "logits", "total"];
    let mut rows = vec![words(&names)];
    rows.extend(phases.iter().map(|phase| {
        let parts = [phase.program, phase.weights, phase.gradients, phase.moments, phase.activations];
        let sizes = parts.into_iter().chain([phase.cache, phase.logits, phase.total]).map(or_dash);
        std::iter::once(phase.kind.name().to_string()).chain(sizes).collect()
    }));
    columns(&rows)
}

/// Whether it fits, and what would make it fit.
fn verdict(plan: &Plan) -> String {
    let memory = &plan.memory;
    let peak = format!("peak: {} in the phase {}", size(memory.peak), memory.peak_phase);
    let each = if plan.ranks > 1 { " for each rank" } else { "" };
    let mut text = match memory.available {
        None => format!("{peak}; the available memory is not known: set --memory\n"),
        Some(most) if memory.fits => format!("{peak}; it fits: {} are available{each}\n", size(most)),
        Some(most) => format!("{peak}; it DOES NOT FIT: {} are available{each}\n", size(most)),
    };
    text += &plan.micro_batch.as_ref().map_or(String::new(), micro_batch);
    if !memory.fits && !plan.remedies.is_empty() {
        text += "\nwhat would lower the peak, each line alone:\n";
        let shown = plan.remedies.iter().take(MOST_CHANGES);
        let rows: Vec<Vec<String>> = shown
            .map(|remedy| {
                let fits = if remedy.fits { "fits" } else { "does not fit" };
                let effect = remedy.effect.as_ref().map_or(String::new(), |effect| format!(" ({effect})"));
                vec![
                    format!("{}{effect}", remedy.change),
                    format!("saves {}", size(remedy.saves)),
                    size(remedy.peak),
                    fits.into(),
                ]
            })
            .collect();
        text += &columns(&rows);
    }
    text + "\n"
}

/// The last line of a pipeline: the stage with the largest peak, and the time of all.
pub(super) fn of_pipeline(plan: &PipelinePlan) -> String {
    let fits = if plan.fits { "every stage fits" } else { "NOT EVERY STAGE FITS" };
    let all = plan.seconds.map_or(String::new(), |all| format!("; {} in all", seconds(all)));
    format!("pipeline: the largest peak is {}, in {}; {fits}{all}\n", size(plan.peak), plan.peak_stage)
}

/// Seconds in words.
fn seconds(seconds: f64) -> String {
    about(Duration::from_secs_f64(seconds.clamp(0.0, 1e12)))
}

/// The tokens of a pass, and how many would fit.
fn micro_batch(planned: &PlannedMicroBatch) -> String {
    let limit = if planned.tokens > planned.limit {
        format!("those of the longest row; at most {} otherwise", planned.limit)
    } else {
        format!("at most {}", planned.limit)
    };
    let per_token = match planned.bytes_per_token as f64 / 1024.0 {
        kib if kib < 100.0 => format!("{kib:.1} KiB"),
        kib => format!("{:.2} MiB", kib / 1024.0),
    };
    let largest = match planned.largest {
        Some(0) | None => String::new(),
        Some(largest) if largest < planned.longest_row => {
            format!("; the largest that fits has about {largest} tokens, and the longest row {}", planned.longest_row)
        }
        Some(largest) => format!("; the largest that fits has about {largest} tokens"),
    };
    format!("micro-batch: {} tokens ({limit}), {per_token} a token{largest}\n", planned.tokens)
}

fn work(plan: &Plan) -> String {
    let work = &plan.work;
    // Nothing is trained in the batches of `generate`.
    let (part, rate) = if plan.micro_batch.is_some() { ("update", "training") } else { ("batch", "reading prompts") };
    let mut text = format!(
        "{part}: {} rows, {} tokens, {} operations",
        work.rows_per_update,
        count(work.tokens_per_update),
        count(work.flops_per_update),
    );
    text += &match (work.updates, work.tokens, work.flops) {
        (Some(updates), Some(tokens), Some(flops)) => {
            let plural = match (updates, part) {
                (1, _) => "",
                (_, "batch") => "es",
                _ => "s",
            };
            format!("; {updates} {part}{plural}: {} tokens, {} operations\n", count(tokens), count(flops))
        }
        _ => "; the number of updates depends on the data\n".into(),
    };
    let Some(time) = &plan.time else { return text };
    let _ = write!(text, "time: {} {}", seconds(time.update), if part == "batch" { "a batch" } else { "an update" });
    if time.rollout > 0.0 && time.training > 0.0 {
        let parts = [time.rollout, time.scoring, time.training].map(seconds);
        let _ = write!(text, " (rollout {}, scoring {}, training {})", parts[0], parts[1], parts[2]);
    }
    let total = time.total.map_or(String::new(), |total| format!(", {} in all", seconds(total)));
    let sampled = match time.seconds_per_token {
        0.0 => String::new(),
        each => format!(", {} tokens a second of each response", three_digits(each.recip())),
    };
    let flops = three_digits(time.flops_per_second / 1e9);
    let _ = writeln!(text, "{total}; measured: {flops} GFLOP/s in {rate}{sampled}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits_however_small_they_are() {
        for (rate, expected) in [(0.034567, "0.0346"), (11.962, "12.0"), (0.0, "0"), (1234.5, "1234"), (7.25, "7.25")] {
            assert_eq!(three_digits(rate), expected);
        }
    }
}
