//! The interpreter of the flags in the table: those that are set become settings, notes or refusals.

use clap::{ArgMatches, Command};
use rlhf::settings::Preset;

use super::super::args::on_line;
use super::super::errors::Messages;
use super::super::setting::Setting;
use super::line::{Given, Line};
use super::lookup::{hint, is_foreign};
use super::table::{System, To};
use super::{chat, trl};

/// Removes the flags of other systems from the `settings` of the file, and finds those on the command line. The settings that they stand
/// for are appended to `settings`; a flag of ours on the command line still wins. Flags without an effect are noted.
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
    let line = Line { command, flags, given: given(command, is_chat, flags, settings) };
    interpret(&line, is_chat, settings, messages);
    let forced = if is_chat { chat::translate(&line, settings, messages) } else { None };
    trl::translate(&line, settings, messages);
    forced
}

/// Returns the flags of other systems that are set, in the order of the table, and removes them from `settings`.
fn given(command: &Command, is_chat: bool, flags: &ArgMatches, settings: &mut Vec<Setting>) -> Vec<Given> {
    let own = command.get_name();
    let added = |name: &str| command.get_arguments().any(|arg| arg.get_id() == name && is_foreign(arg));
    // A flag of both systems is DeepSpeed-Chat's with its preset.
    let is_of = |system: System, name: &str| match system {
        System::DeepSpeedChat => is_chat || System::Trl.flag(own, name).is_none(),
        _ => !(is_chat && System::DeepSpeedChat.flag(own, name).is_some()),
    };
    let mut given = Vec::new();
    for system in [System::DeepSpeedChat, System::Trl] {
        for (name, to) in system.flags_of(own).filter(|(name, _)| added(name) && is_of(system, name)) {
            let place = settings.iter().position(|setting| setting.key == name);
            let of_file = place.map(|place| settings.remove(place).values);
            let of_line = on_line(flags, name).then(|| {
                let values: Vec<String> = flags.get_many(name).into_iter().flatten().cloned().collect();
                if values.is_empty() && system == System::Trl { vec!["true".to_string()] } else { values }
            });
            given.extend(of_line.or(of_file).map(|values| Given { system, name, to, values }));
        }
    }
    given
}

/// Sets what a flag stands for by itself, notes flags without an effect, by reason, and refuses those whose value is not supported.
fn interpret(line: &Line<'_>, is_chat: bool, settings: &mut Vec<Setting>, messages: &mut Messages) {
    let Messages { refusals, notes } = messages;
    let mut noted: Vec<(&str, Vec<&str>)> = Vec::new();
    for given in &line.given {
        let name = given.name;
        match given.to {
            to if given.system == System::DeepSpeedChat && !is_chat => refusals.say(name, of_another_preset(name, to)),
            To::Is(ours) if line.on_line(ours) => {
                refusals.say(name, format!("{name} and {ours} are the same setting: give one of them"));
                refusals.about_too(ours);
            }
            To::Is(ours) => line.set(name, Setting::new(ours, given.values.clone()), settings, refusals),
            To::NoEffect(why) => match noted.iter_mut().find(|(other, _)| *other == why) {
                Some((_, names)) => names.push(name),
                None => noted.push((why, vec![name])),
            },
            To::Only(fine, why) if !allows(fine, &given.word()) => {
                let fine: Vec<&str> = fine.iter().copied().filter(|word| !word.is_empty()).collect();
                refusals.say(name, format!("{name} = {}: {why}; expected {}", given.start(), fine.join(" or ")));
            }
            _ => {}
        }
    }
    if !noted.is_empty() {
        let groups: Vec<String> = noted.iter().map(|(why, names)| format!("{} ({why})", names.join(", "))).collect();
        notes.push(format!("without effect here: {}", groups.join("; ")));
    }
}

/// Returns the error for a flag of DeepSpeed-Chat without its preset.
fn of_another_preset(name: &str, to: To) -> String {
    match to {
        To::Is(ours) => format!("{name} is a flag of --preset deepspeed-chat; with other presets use {ours}"),
        _ => {
            let hint = hint(name, &[]).map_or(String::new(), |hint| format!("; {hint}"));
            format!("{name} is a flag of --preset deepspeed-chat only{hint}")
        }
    }
}

/// Returns whether `fine` contains `value`, or another word for it where it is true or false.
fn allows(fine: &[&str], value: &str) -> bool {
    let value = match value {
        "no" | "0" if fine.contains(&"false") => "false",
        "yes" | "1" if fine.contains(&"true") => "true",
        value => value,
    };
    fine.contains(&value)
}
