//! `#[derive(Choices)]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Error, LitStr, Result, Token, bracketed, punctuated::Punctuated};

use crate::words::{Case, doc};

/// The `choice` attribute of an enum.
struct EnumAttributes {
    /// Spelling of the names that no attribute sets.
    case: Case,
    value_name: String,
    /// Description of a valid value, in place of the names.
    expected: Option<String>,
}

/// The name of a value, and its further names.
struct Names {
    name: Option<String>,
    aliases: Vec<String>,
}

pub(crate) fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let Data::Enum(data) = &input.data else {
        return Err(Error::new_spanned(&input.ident, "Choices: expected an enum"));
    };
    let EnumAttributes { case, value_name, expected } = enum_attributes(&input.attrs)?;
    let mut names = Vec::new();
    let mut rows = Vec::new();
    for variant in &data.variants {
        if !variant.fields.is_empty() {
            return Err(Error::new_spanned(variant, "Choices: expected a variant without data"));
        }
        let Names { name, aliases } = variant_names(&variant.attrs)?;
        let ident = &variant.ident;
        let name = name.unwrap_or_else(|| case.of(&ident.to_string()));
        let help = doc(&variant.attrs);
        rows.push(quote! {
            (Self::#ident, ::rlhf_base::schema::Choice { name: #name, aliases: &[#(#aliases),*], help: #help })
        });
        names.push(name);
    }
    let ident = &input.ident;
    let expected = expected.unwrap_or_else(|| or(&names));
    Ok(quote! {
        impl ::rlhf_base::schema::Choices for #ident {
            const ALL: &'static [(Self, ::rlhf_base::schema::Choice)] = &[#(#rows),*];
            const VALUE_NAME: &'static str = #value_name;
            const EXPECTED: &'static str = #expected;
        }
    })
}

/// Joins names as `a, b or c`.
fn or(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [name] => name.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// Reads `#[choice(rename_all = "snake_case", value_name = "TOKEN", expected = "a token")]` of the enum.
fn enum_attributes(attributes: &[Attribute]) -> Result<EnumAttributes> {
    let mut result = EnumAttributes { case: Case::Kebab, value_name: "NAME".into(), expected: None };
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("choice")) {
        attribute.parse_nested_meta(|meta| {
            let text: LitStr = meta.value()?.parse()?;
            if meta.path.is_ident("rename_all") {
                let unknown = || Error::new(text.span(), "expected snake_case, kebab-case or lowercase");
                result.case = Case::named(&text.value()).ok_or_else(unknown)?;
            } else if meta.path.is_ident("value_name") {
                result.value_name = text.value();
            } else if meta.path.is_ident("expected") {
                result.expected = Some(text.value());
            } else {
                return Err(meta.error("expected rename_all, value_name or expected"));
            }
            Ok(())
        })?;
    }
    Ok(result)
}

/// Reads `#[choice(name = "...", aliases = ["...", "..."])]` of a variant.
fn variant_names(attributes: &[Attribute]) -> Result<Names> {
    let mut names = Names { name: None, aliases: Vec::new() };
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("choice")) {
        attribute.parse_nested_meta(|meta| {
            let value = meta.value()?;
            if meta.path.is_ident("name") {
                names.name = Some(value.parse::<LitStr>()?.value());
            } else if meta.path.is_ident("alias") {
                names.aliases.push(value.parse::<LitStr>()?.value());
            } else if meta.path.is_ident("aliases") {
                let list;
                bracketed!(list in value);
                let list = Punctuated::<LitStr, Token![,]>::parse_terminated(&list)?;
                names.aliases.extend(list.iter().map(LitStr::value));
            } else {
                return Err(meta.error("expected name, alias or aliases"));
            }
            Ok(())
        })?;
    }
    Ok(names)
}
