//! Flags of clap, made from the descriptions of settings.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Arg, ArgAction, ArgMatches, Command};
use rlhf::Result;
use rlhf::schema::{Choice, Field, Settings, Shape, Values};

use super::help;

/// Flags that are not keys of a configuration file.
pub(super) const NOT_SETTINGS: [&str; 2] = ["config", "help"];

/// A value of a flag of [`command`]; flags of other systems hold `String`s.
#[derive(Debug, Clone)]
pub(super) struct Word(pub(super) String);

/// Builds the clap command `name` whose flags are the settings of `C`, in the forms that `rlhf` accepts.
///
/// A yes-or-no flag stands alone or takes `=true` or `=false`; `none` or `null` unsets an optional value; if a flag is written twice, the
/// last value counts, and a list has the values of both. Values stay [`Word`]s, which [`read`] parses: the parsers of the flags only check
/// them.
pub(super) fn command<C: Settings>(name: &'static str) -> Command {
    let mut fields = C::fields();
    // `--help` prints headings in the order in which their first flags were added. Positional arguments keep the order of the struct.
    fields.sort_by_key(
        |field| if field.positional { (0, 0) } else { help::place(name, field.name, Some(field.heading)) },
    );
    fields.into_iter().fold(Command::new(name).args_override_self(true), |command, field| command.arg(flag(field)))
}

/// Reads the settings of `C` from the flags of [`command`].
pub(super) fn read<C: Settings>(flags: &ArgMatches) -> Result<C> {
    let values: &Values<'_> = &|name| Some(flags.get_many::<Word>(name)?.map(|word| word.0.clone()).collect());
    C::read(values)
}

/// Returns the last value of the flag `name`, as text; none if there is no such flag.
pub(super) fn text<'m>(flags: &'m ArgMatches, name: &str) -> Option<&'m str> {
    flags.try_get_many::<Word>(name).ok()??.next_back().map(|word| word.0.as_str())
}

fn flag(field: Field) -> Arg {
    let several = field.shape == Shape::List;
    let arg = Arg::new(field.name)
        .help(field.help)
        .allow_negative_numbers(true)
        .action(if several { ArgAction::Append } else { ArgAction::Set })
        .required(field.required)
        .hide(field.hidden)
        .value_name(field.value_name);
    let arg = if field.positional { arg } else { arg.long(field.name).help_heading(field.heading) };
    let arg = match field.shape {
        // Without the `=`, a prompt after `--ignore_eos` would be its value.
        Shape::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        Shape::List if field.alone.is_some() => arg.num_args(0..),
        Shape::List if field.several || field.positional => arg.num_args(1..),
        _ if field.alone.is_some() => arg.num_args(0..=1),
        _ => arg,
    };
    let arg = if field.equals { arg.require_equals(true) } else { arg };
    let arg = field.aliases.iter().fold(arg, |arg, alias| arg.alias(*alias));
    let arg = field.alone.into_iter().fold(arg, Arg::default_missing_value);
    let arg = field.delimiter.into_iter().fold(arg, Arg::value_delimiter);
    let arg = field.default.into_iter().fold(arg, |arg, default| arg.default_value(default));
    if !field.listed {
        arg.value_parser(move |text: &str| (field.check)(text).map(|()| Word(text.to_string())))
    } else {
        arg.value_parser(PossibleValuesParser::new(field.choices.into_iter().map(possible_value)).map(Word))
    }
}

fn possible_value(choice: Choice) -> PossibleValue {
    let value = PossibleValue::new(choice.name).aliases(choice.aliases);
    if choice.help.is_empty() { value } else { value.help(choice.help) }
}

/// Returns whether `name` is the name of a flag, or one of its aliases.
pub(super) fn is_named(arg: &Arg, name: &str) -> bool {
    arg.get_id() == name
        || arg.get_long() == Some(name)
        || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}
