//! `rlhf report`, and the report that each run leaves.

use crate::cli::{PPO, REWARD, SFT, Scratch};
use rlhf::report::report;
use rlhf::run::Event;
use rlhf::settings::{PpoConfig, ReportConfig};
use rlhf::train::ppo::PpoTrainer;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Texts that must be shown as they are, and change nothing else of the page.
const HOSTILE: [&str; 6] = [
    "<script>document.title = 'owned'</script>",
    "</pre></article><img src=x onerror=\"alert(1)\">",
    "\"><svg onload='alert(2)'> &lt;b&gt; ]]> <!-- \\u003cscript\\u003e",
    "שלום עולם, مرحبا \u{202e}dlrow",
    "👩\u{200d}🚀 e\u{301} 東京 \u{0}\u{1b}[2J\r\nlines\n",
    "",
];

/// The last values of the curves on a page, by metric.
fn last_values(page: &str) -> BTreeMap<String, f64> {
    let entries = page.split("<data data-metric=\"").skip(1).map(|rest| {
        let (name, rest) = rest.split_once("\" value=\"").unwrap();
        (name.to_string(), rest.split('"').next().unwrap().parse().unwrap())
    });
    entries.collect()
}

/// Checks that the page has the last value of every metric of a run: as a curve, as a constant, or by the name of an equal one.
#[track_caller]
fn shows(page: &str, metrics: &[Map<String, Value>]) {
    let shown = last_values(page);
    let last = |name: &str| metrics.iter().rev().find_map(|line| line.get(name)).and_then(Value::as_f64).unwrap();
    assert!(shown.len() >= 3, "{shown:?}");
    for (name, value) in &shown {
        assert_eq!(*value, last(name), "{name}");
    }
    let second = ["step", "episode", "epoch"];
    for name in metrics.iter().flat_map(Map::keys).filter(|name| !second.contains(&name.as_str())) {
        // The whole score, where there is one reward.
        let is_reward = ["objective/scores/", "eval/scores/"].iter().any(|start| name.starts_with(start));
        assert!(shown.contains_key(name) || page.contains(&format!("{name}\u{a0}=")) || is_reward, "no {name}");
    }
}

#[test]
fn every_run_leaves_a_report_with_the_last_values_of_its_metrics() {
    let scratch = Scratch::new();
    let sampled = "--num_sample_generations 2 --eval_split_size 2 --eval_steps 1";
    for (line, verdict) in [
        (
            format!("{PPO} --total_episodes 12 {sampled}"),
            "<li class=\"neutral\"><b aria-hidden=\"true\">·</b> The run is finished: 3 updates.",
        ),
        (format!("{SFT} --output_dir sft"), "The loss "),
        (format!("{REWARD} --output_dir reward-model"), "The accuracy on training pairs "),
    ] {
        scratch.succeeds(&line);
        let out = line.rsplit("--output_dir ").next().unwrap().split(' ').next().unwrap();
        let page = scratch.read(&format!("{out}/report.html"));
        assert!(page.contains(verdict), "{page}");
        shows(&page, &scratch.metrics(out));
        // The command writes the same page.
        assert_eq!(scratch.succeeds(&format!("report {out}")), format!("{out}/report.html\n"));
        assert_eq!(scratch.read(&format!("{out}/report.html")), page);
    }
    let page = scratch.read("out/report.html");
    for part in ["sample prompt, greedy", "held-out prompt", "<th scope=\"row\">checks</th>", "total_episodes"] {
        assert!(page.contains(part), "no {part}");
    }
    scratch.succeeds(&format!("{SFT} --output_dir without --no_report"));
    assert!(!scratch.path("without/report.html").exists());
}

#[test]
fn several_runs_are_drawn_over_one_another_with_the_settings_that_differ() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --output_dir a"));
    scratch.succeeds(&format!("{SFT} --output_dir b --learning_rate 1e-3"));
    assert_eq!(scratch.succeeds("report a b"), "report.html\n");
    let page = scratch.read("report.html");
    let (_, differing) = page.split_once("<section id=\"differences\">").unwrap();
    let (differing, _) = differing.split_once("</section>").unwrap();
    let names: Vec<&str> =
        differing.split("<th scope=\"row\">").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
    assert_eq!(names, ["learning_rate"]);
    assert!(
        differing.contains("0.001") && page.contains("</i>a</span>") && page.contains("</i>b</span>"),
        "{differing}"
    );
    let (_, loss) = page.split_once("<b>Loss: training rows</b>").or_else(|| page.split_once("<b>Loss</b>")).unwrap();
    let (loss, _) = loss.split_once("</figure>").unwrap();
    assert_eq!(loss.matches("data-label=").count(), 2, "{loss}");
}

#[test]
fn of_runs_of_different_commands_the_settings_that_two_have_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let differences = |settings: &[&str]| {
        let runs = settings.iter().enumerate().map(|(at, settings)| {
            let run = dir.path().join(at.to_string());
            std::fs::create_dir_all(&run).unwrap();
            std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"loss\":0.5}\n").unwrap();
            std::fs::write(run.join("config.yaml"), settings).unwrap();
            run
        });
        let mut config = ReportConfig::new(runs);
        config.output = Some(dir.path().join("x.html"));
        let page = std::fs::read_to_string(report(&config).unwrap().path).unwrap();
        let (_, section) = page.split_once("<section id=\"differences\">").unwrap();
        section.split_once("</section>").unwrap().0.to_string()
    };
    let names = |section: &str| -> Vec<String> {
        let rows = section.split("<th scope=\"row\">").skip(1);
        rows.map(|row| row.split('<').next().unwrap().to_string()).collect()
    };
    let (ppo, grpo) = ("seed: 1\nkl_coef: 0.1\nvf_coef: 1\nlam: 1\n", "seed: 1\nkl_coef: 0.2\nbeta: 0\nlam: 1\n");
    let sft = "seed: 2\npacking: true\noutput_dir: c\n";
    let all = differences(&[ppo, grpo, sft]);
    assert_eq!(names(&all), ["seed", "kl_coef"]);
    let left_out =
        "<p class=\"note\">Settings that only one of these runs has, as those of its command alone, are left out (";
    // vf_coef, beta, packing, output_dir.
    assert!(all.contains(&format!("{left_out}4); ")) && all.contains("\u{2013}"), "{all}");
    let none = differences(&["seed: 1\nlam: 1\n", "seed: 1\nbeta: 0\n"]);
    assert!(none.contains("<p>None, but the folder.</p>") && none.contains(&format!("{left_out}2); ")), "{none}");
    let same = differences(&[ppo, &ppo.replace("lam: 1", "lam: 0.9")]);
    assert!(names(&same) == ["lam"] && !same.contains("left out"), "{same}");
}

/// Returns the JSON that an expression on the script of the page is, by Node.js, if that is installed.
fn by_script(expression: &str) -> Option<Value> {
    let script = concat!(
        "const document = { getElementById: () => null, querySelectorAll: () => [] };\n",
        "const IntersectionObserver = class {};\n",
        include_str!("../../rlhf/src/report/page.js")
    );
    let child = Command::new("node").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    if child.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        crate::support::say("without Node.js the script of the page is not tested");
        return None;
    }
    let mut child = child.unwrap();
    let whole = format!("{script}\nconsole.log(JSON.stringify({expression}));\n");
    child.stdin.take().unwrap().write_all(whole.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{expression}");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_pointer_takes_the_nearest_update_of_all_curves_and_the_values_of_that_alone() {
    let curve = |label: &str, updates: &[u32], thinned: bool| json!({"label": label, "thinned": thinned, "x": updates, "y": updates});
    let (short, long): (Vec<u32>, Vec<u32>) = ((1..=20).collect(), (1..=100).collect());
    let shown = |curves: &[Value], wanted: f64| {
        let chart = json!({"curves": curves, "marks": [{"label": "no_stop", "x": 60}]});
        let found =
            by_script(&format!("[updateAt({chart}, {wanted}), pointsAt({chart}, updateAt({chart}, {wanted}))]"))?;
        let points = found[1].as_array().unwrap().iter();
        let points = points.map(|point| format!("{} {}", point["label"].as_str().unwrap(), point["update"])).collect();
        Some((found[0].as_f64().unwrap(), points))
    };
    let seeds = [curve("a", &short, false), curve("b", &short, false), curve("c", &long, false)];
    let rare = [curve("a", &long, false), curve("held-out", &[10, 20], false)];
    let thinned = [curve("a", &[1, 40, 58, 65], true), curve("b", &[1, 30, 50], true)];
    let cases: [(&[Value], f64, f64, &[&str]); 8] = [
        (&seeds, 20.4, 20.0, &["a 20", "b 20", "c 20"]),
        (&seeds, 20.6, 21.0, &["c 21"]),
        (&seeds, 400.0, 100.0, &["c 100"]),
        (&rare, 12.8, 13.0, &["a 13"]),
        (&rare, 10.2, 10.0, &["a 10", "held-out 10"]),
        // A thinned curve has other updates as well, within its own; a mark is at its own update.
        (&thinned, 31.0, 30.0, &["a 40", "b 30"]),
        (&thinned, 60.4, 60.0, &["a 58"]),
        (&thinned, 64.0, 65.0, &["a 65"]),
    ];
    for (curves, wanted, update, points) in cases {
        let Some(found) = shown(curves, wanted) else { return };
        let points: Vec<String> = points.iter().copied().map(String::from).collect();
        assert_eq!(found, (update, points), "{wanted}");
    }
}

#[test]
fn an_order_is_offered_where_numbers_differ_0_among_them() {
    let found = by_script("[differ(['0', '1']), differ(['', '0']), differ(['0', '0']), differ([])]");
    assert!(found.is_none_or(|found| found == json!([true, true, false, false])));
}

#[test]
fn a_run_that_is_stopped_early_leaves_a_report_too() {
    let scratch = Scratch::new();
    let [policy, reward, prompts, out] = ["policy", "reward", "prompts.jsonl", "out"].map(|name| scratch.path(name));
    let mut config = PpoConfig::new(policy, reward, prompts, &out);
    config.response_length = 8;
    config.total_episodes = Some(12);
    config.per_device_train_batch_size = Some(4);
    let mut trainer = PpoTrainer::from_config(&config).unwrap();
    let stop = |event: &Event<'_>| match event {
        Event::Update { step: 2, .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    assert_eq!(trainer.train_with(stop).unwrap(), 2);
    let page = scratch.read("out/report.html");
    assert!(page.contains("The run ended early, after 2 of 3 updates."), "{page}");
    shows(&page, &scratch.metrics("out"));
}

#[test]
fn bad_folders_and_files_that_are_no_reports_are_one_error() {
    let scratch = Scratch::new();
    scratch.refuses("report", 2, &["required", "RUN"]);
    scratch.refuses("report nowhere", 1, &["nowhere", "expected the folder of a run", "found no such folder"]);
    scratch.refuses("report policy", 1, &["policy", "found no metrics.jsonl in it"]);
    scratch.succeeds(&format!("{SFT} --no_report"));
    scratch.write("thesis.html", "<!doctype html><p>mine");
    scratch.refuses(
        "report out --output thesis.html",
        1,
        &["thesis.html", "expected a report", "--overwrite_output_file"],
    );
    scratch.succeeds("report out --output thesis.html --overwrite_output_file");
    scratch.succeeds("report out --output thesis.html");
    scratch.refuses("report out --output none/x.html", 2, &["output = none/x.html", "in a folder that exists"]);
    scratch.refuses(
        "report out --output policy",
        2,
        &["output = policy", "expected a file, found a folder", "report.html"],
    );
    scratch.write("out/metrics.jsonl", &(scratch.read("out/metrics.jsonl") + "garbage\n{\"step\":9,\"lo"));
    let ran = scratch.run("report out");
    let warning = "out: metrics.jsonl: 2 lines could not be read and are left out";
    assert_eq!((ran.code, ran.stderr), (0, format!("warning: {warning}\n")));
    assert!(scratch.read("out/report.html").contains("</b> metrics.jsonl: 2 lines could not be read"));
    scratch.write("out/metrics.jsonl", "garbage\n");
    scratch.refuses("report out", 1, &["out", "found none (metrics.jsonl: 1 line could not be read"]);
    scratch.write("out/metrics.jsonl", "");
    scratch.refuses("report out", 1, &["out", "expected a run with updates"]);
    // At the end of a run it is a warning.
    let line = format!("{SFT} --output_dir mine --save_steps 2");
    scratch.succeeds(&line);
    scratch.write("mine/report.html", "mine");
    let ran = scratch.run(&format!("{line} --max_steps 4 --resume_from_checkpoint true"));
    assert!(ran.code == 0 && ran.stderr.contains("warning: no report: "), "{}", ran.stderr);
    assert_eq!((scratch.read("mine/report.html").as_str(), scratch.metrics("mine").len()), ("mine", 4));
}

#[test]
fn alarms_and_rollbacks_are_in_the_verdict_on_the_curves_and_in_a_list_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
    let line = |step: u32| {
        let kl = f64::from(step * step) / 4.0;
        let line = json!({"step": step, "episode": 8 * step, "objective/scores": kl.sin(), "objective/kl": kl, "lr": kl / 9.0});
        format!("{line}\n")
    };
    write("metrics.jsonl", (1..=6).map(line).collect());
    let far = "update 4: the KL to the reference is 4.00 nats per token: the policy has left its start; a lower learning_rate keeps it near";
    let lines = [
        json!({"step": 4, "alarm": "runaway_kl", "message": far}),
        json!({"step": 5, "alarm": "rollback", "message": "update 5: back to checkpoint-2"}),
        json!({"step": 6, "alarm": HOSTILE[0], "message": HOSTILE[1], "rollbacks": 1}),
    ];
    write("alarms.jsonl", lines.map(|line| format!("{line}\n")).concat() + "{\"step\":6,\"al");
    let page = std::fs::read_to_string(report(&ReportConfig::new([dir.path()])).unwrap().path).unwrap();
    for part in [
        "2 alarms: runaway_kl at update 4, &lt;script&gt;",
        "; 1 rollback: after update 5.</li>",
        "runaway_kl <span class=\"unit\">update 4</span></dt>\n<dd>the KL to the reference is 4.00 nats per token: the policy has left its \
         start</dd>\n<dd><span class=\"unit\">To try:</span> a lower learning_rate keeps it near</dd>",
        "<dd>back to checkpoint-2</dd>",
        "alarms.jsonl: 1 line could not be read and is left out",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let marks = |title: &str| {
        let (_, figure) = page.split_once(&format!("<figcaption><b>{title}</b>")).unwrap();
        let (figure, _) = figure.split_once("</figure>").unwrap();
        let (_, description) = figure.split_once("<desc>").unwrap();
        assert!(description.split_once("</desc>").unwrap().0.contains("rollback at update 5"), "{figure}");
        figure.matches("<g class=\"mark").count()
    };
    assert_eq!(["Score", "KL to the reference", "Learning rate"].map(marks), [3, 2, 1]);
    assert_eq!(page.matches("<script").count(), 1);
}

#[test]
fn each_of_several_rewards_is_shown_and_runs_whose_numbers_are_not_comparable_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, rewards: &str, template: &str| {
        let run = dir.path().join(name);
        std::fs::create_dir_all(run.join("samples")).unwrap();
        let line = |step: u32| format!("{}\n", json!({"step": step, "objective/scores": f64::from(step)}));
        std::fs::write(run.join("metrics.jsonl"), line(1) + &line(2)).unwrap();
        std::fs::write(run.join("config.yaml"), format!("reward: [{rewards}]\n")).unwrap();
        let card = format!("| | |\n|---|---|\n| tokenizer | eos \"</s>\" (2); chat template: {template} |\n");
        std::fs::write(run.join("README.md"), card).unwrap();
        let row =
            json!({"step": 1, "prompt": "p", "response": "r", "score": 1, "components": {"format": 1, "facts": 0.5}});
        let single = json!({"step": 1, "prompt": "q", "response": "r", "score": 1, "components": {"alone": 1}});
        std::fs::write(run.join("samples/update-000001.jsonl"), format!("{row}\n{single}\n")).unwrap();
        run
    };
    let page = |runs: &[&std::path::PathBuf]| {
        let mut config = ReportConfig::new(runs);
        config.output = Some(dir.path().join("x.html"));
        config.overwrite_output_file = true;
        std::fs::read_to_string(report(&config).unwrap().path).unwrap()
    };
    let (a, b, c) = (run("a", "format", "a/x"), run("b", "format", "b/x"), run("c", "facts", "c/x"));
    let same = page(&[&a, &b]);
    assert!(same.contains("\u{b7} format 1 \u{b7} facts 0.5") && !same.contains("alone"), "{same}");
    assert!(!same.contains("of these runs differ"), "{same}");
    let differing = page(&[&a, &c]);
    assert!(differing.contains("The rewards of these runs differ: their scores are not on one scale."), "{differing}");
    assert!(!differing.contains("tokenizers of these"), "{differing}");
    std::fs::write(b.join("README.md"), "|---|---|\n| tokenizer | eos \"x\" (5) |\n").unwrap();
    assert!(page(&[&a, &b]).contains("The tokenizers of these runs differ: "));
}

/// Writes a run of 1,000 updates with 5,000 samples to `dir`.
fn write_large_run(dir: &Path) {
    let line = include_str!("../../../examples/smollm2/results/grpo-seed-1.metrics.jsonl").lines().last().unwrap();
    let line: Map<String, Value> = serde_json::from_str(line).unwrap();
    let lines = (1..=1000).map(|step| {
        let wave = 1.0 + (f64::from(step) * 0.7).sin() / 3.0 + f64::from(step) / 500.0;
        let number = |(name, value): (&String, &Value)| match name.as_str() {
            "step" => (name.clone(), json!(step)),
            _ => (name.clone(), json!(value.as_f64().unwrap() * wave + 1e-9 * wave)),
        };
        format!("{}\n", Value::Object(line.iter().map(number).collect()))
    });
    std::fs::write(dir.join("metrics.jsonl"), lines.collect::<String>()).unwrap();
    std::fs::write(dir.join("config.yaml"), "seed: 1\nnote: \"<script>alert(3)</script>\"\n").unwrap();
    std::fs::create_dir(dir.join("samples")).unwrap();
    for step in 1..=10 {
        let rows = (0..500).map(|row| {
            let text = HOSTILE[row % HOSTILE.len()];
            let long = if row == 7 { "x".repeat(100_000) } else { format!("{text} and so on. ").repeat(8) };
            let score = (row as f64 - 250.0) * f64::from(step) / 100.0;
            let row = json!({"step": step, "prompt": format!("{row} {text}"), "response": long, "score": score,
                             "components": {text: score, "r": 1}, "finish_reason": text, "num_tokens": 3});
            format!("{row}\n")
        });
        std::fs::write(dir.join(format!("samples/update-{step:06}.jsonl")), rows.collect::<String>()).unwrap();
    }
}

#[test]
fn a_thousand_updates_and_hostile_texts_make_a_small_page_without_their_markup() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("<b>run & 'co'");
    std::fs::create_dir(&run).unwrap();
    write_large_run(&run);
    let began = Instant::now();
    let path = report(&ReportConfig::new([&run])).unwrap().path;
    let took = began.elapsed();
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    // Under a second with optimization, which tests have little of.
    assert!(took < Duration::from_secs(5), "{took:?}");
    crate::support::say(&format!("a page of {} bytes in {took:?}", page.len()));
    for (markup, count) in [("<script", 1), ("</script", 1), ("<img", 0), ("onload='", 0), ("<h1>", 1), ("<b>run", 0)] {
        assert_eq!(page.matches(markup).count(), count, "{markup}");
    }
    for text in [
        "&lt;script&gt;document.title",
        "&lt;b&gt;run &amp; &#39;co&#39;",
        "\\u{202e}dlrow",
        "\\u{0}\\u{1b}[2J",
        "98800 more characters",
    ] {
        assert!(page.contains(text), "no {text}");
    }
    assert!(page.contains("prompts are shown") && page.contains("&amp;lt;b&amp;gt;"));
    let metrics = crate::cli::json_lines(&std::fs::read_to_string(run.join("metrics.jsonl")).unwrap());
    let shown = last_values(&page);
    // Those that are 0 in all updates are the same numbers here.
    assert!(shown.len() > 25, "{shown:?}");
    for (name, value) in shown {
        let mean = metrics[950..].iter().map(|line| line[&name].as_f64().unwrap()).sum::<f64>() / 50.0;
        assert!(
            (value - mean).abs() <= 1e-9 * mean.abs(),
            "{name}: {value} is not {mean}, the mean of the last 50 updates"
        );
    }
}
