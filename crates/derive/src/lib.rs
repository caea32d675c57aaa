//! Derive macros of rlhf's settings.
//!
//! `#[derive(Settings)]` makes a struct the one description of its settings: a field's name, doc comment and `setting` attribute are what
//! flags, configuration files, help and documentation are made of. `#[derive(Choices)]` gives the values of an enum their names.
//!
//! The macros generate paths to the module `rlhf_base::schema`, which has the traits and documents the attributes.

mod choices;
mod settings;
mod words;

use proc_macro::TokenStream;

/// Implements `Settings` for a struct with named fields.
#[proc_macro_derive(Settings, attributes(setting))]
pub fn settings(input: TokenStream) -> TokenStream {
    finish(syn::parse(input).and_then(|input| settings::derive(&input)))
}

/// Implements `Choices`, and with it `Setting`, for an enum without data.
#[proc_macro_derive(Choices, attributes(choice))]
pub fn choices(input: TokenStream) -> TokenStream {
    finish(syn::parse(input).and_then(|input| choices::derive(&input)))
}

fn finish(code: syn::Result<proc_macro2::TokenStream>) -> TokenStream {
    code.unwrap_or_else(|error| error.to_compile_error()).into()
}
