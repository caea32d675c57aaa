//! The interpreter of the flags in the table: those that are set become settings, notes or refusals.

use clap::{ArgMatches, Command};
use rlhf::settings::Preset;

use super::super::args::on_line;
use super::super::errors::Messages;
use super::super::setting::Setting;
use super::line::{ForeignFlag, Line};
use super::lookup::{hint, is_foreign};
use super::table::{System, To};
use super::{chat, trl};

/// Replaces the flags of other systems, those in the `settings` of the file and those on the command line, by our settings, which are
/// appended to `settings`. A flag of ours on the command line still wins. Flags without an effect are noted.
///
/// Refused: a value that is not supported, a flag together with ours for the same setting, and a flag of DeepSpeed-Chat with another
/// preset. Returns a setting that wins over the command line.
pub(in crate::cli) fn translate(
    command: &Command,
    preset: Option<Preset>,
    flags: &ArgMatches,
    settings: &mut Vec<Setting>,
    messages: &mut Messages,
) -> Option<Setting> {
    let is_chat = preset == Some(Preset::DeepspeedChat);
    let line = Line { command, flags, foreign_flags: take_foreign_flags(command, is_chat, flags, settings) };
    interpret(&line, is_chat, settings, messages);
    let forced = if is_chat { chat::translate(&line, settings, messages) } else { None };
    trl::translate(&line, settings, messages);
    forced
}

/// Returns the flags of other systems that are set, in the order of the table, and removes them from `settings`.
fn take_foreign_flags(
    command: &Command,
    is_chat: bool,
    flags: &ArgMatches,
    settings: &mut Vec<Setting>,
) -> Vec<ForeignFlag> {
    let command_name = command.get_name();
    let is_added = |name: &str| command.get_arguments().any(|arg| arg.get_id() == name && is_foreign(arg));
    // A flag of both systems is DeepSpeed-Chat's with its preset.
    let belongs_to = |system: System, name: &str| match system {
        System::DeepSpeedChat => is_chat || System::Trl.flag(command_name, name).is_none(),
        _ => !(is_chat && System::DeepSpeedChat.flag(command_name, name).is_some()),
    };
    let mut foreign_flags = Vec::new();
    for system in [System::DeepSpeedChat, System::Trl] {
        let names = system.flags_of(command_name).filter(|(name, _)| is_added(name) && belongs_to(system, name));
        for (name, to) in names {
            let place = settings.iter().position(|setting| setting.key == name);
            let file_values = place.map(|place| settings.remove(place).values);
            let line_values = on_line(flags, name).then(|| {
                let values: Vec<String> = flags.get_many(name).into_iter().flatten().cloned().collect();
                // A flag of TRL that stands alone is a switch.
                if values.is_empty() && system == System::Trl { vec!["true".to_string()] } else { values }
            });
            let values = line_values.or(file_values);
            foreign_flags.extend(values.map(|values| ForeignFlag { system, name, to, values }));
        }
    }
    foreign_flags
}

/// Sets what a flag stands for by itself, notes flags without an effect, by reason, and refuses those whose value is not supported.
fn interpret(line: &Line<'_>, is_chat: bool, settings: &mut Vec<Setting>, messages: &mut Messages) {
    let Messages { refusals, notes } = messages;
    // The reasons, each with the flags that have it.
    let mut without_effect: Vec<(&str, Vec<&str>)> = Vec::new();
    for flag in &line.foreign_flags {
        let name = flag.name;
        match flag.to {
            to if flag.system == System::DeepSpeedChat && !is_chat => refusals.say(name, needs_preset(name, to)),
            To::Is(ours) if line.on_line(ours) || is_other_in_file(line, flag, ours, settings) => {
                refusals.say(name, format!("{name} and {ours} are the same setting: give one of them"));
                refusals.about_too(ours);
            }
            To::Is(ours) => line.set(name, Setting::new(ours, flag.values.clone()), settings, refusals),
            To::NoEffect(why) => match without_effect.iter_mut().find(|(other, _)| *other == why) {
                Some((_, names)) => names.push(name),
                None => without_effect.push((why, vec![name])),
            },
            To::Only(accepted, why) if !accepts(accepted, &flag.word()) => {
                let accepted: Vec<&str> = accepted.iter().copied().filter(|word| !word.is_empty()).collect();
                refusals.say(name, format!("{name} = {}: {why}; expected {}", flag.start(), accepted.join(" or ")));
            }
            _ => {}
        }
    }
    if !without_effect.is_empty() {
        let groups = without_effect.iter().map(|(why, names)| format!("{} ({why})", names.join(", ")));
        notes.push(format!("without effect here: {}", groups.collect::<Vec<_>>().join("; ")));
    }
}

/// Returns whether the file has `flag` and, with another value, our name `ours` of the same setting.
fn is_other_in_file(line: &Line<'_>, flag: &ForeignFlag, ours: &str, settings: &[Setting]) -> bool {
    let is_other = |setting: &Setting| setting.line > 0 && setting.key == ours && setting.values != flag.values;
    !line.on_line(flag.name) && settings.iter().any(is_other)
}

/// Returns the error for a flag of DeepSpeed-Chat without its preset.
fn needs_preset(name: &str, to: To) -> String {
    match to {
        To::Is(ours) => format!("{name} is a flag of --preset deepspeed-chat; with other presets use {ours}"),
        _ => {
            let hint = hint(name, &[]).map_or(String::new(), |hint| format!("; {hint}"));
            format!("{name} is a flag of --preset deepspeed-chat only{hint}")
        }
    }
}

/// Returns whether `accepted` contains `value`, or another word for it where it is true or false.
fn accepts(accepted: &[&str], value: &str) -> bool {
    let value = match value {
        "no" | "0" if accepted.contains(&"false") => "false",
        "yes" | "1" if accepted.contains(&"true") => "true",
        value => value,
    };
    accepted.contains(&value)
}
