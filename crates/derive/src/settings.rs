//! `#[derive(Settings)]`.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::meta::ParseNestedMeta;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Data, DeriveInput, Error, Expr, Field, Fields, GenericArgument, Ident, LitBool, LitChar, LitStr, Path,
    PathArguments, Result, Token, Type, bracketed,
};

use crate::words::doc;

/// The `setting` attribute of a field.
#[derive(Default)]
struct Attributes {
    flatten: bool,
    positional: bool,
    required: bool,
    hide: bool,
    /// A flag of several words: `--names a b`.
    several: bool,
    /// A value that follows `=` only.
    equals: bool,
    /// The help and the errors of the flag do not list the choices.
    unlisted: bool,
    heading: Option<Expr>,
    aliases: Vec<String>,
    default: Option<Expr>,
    /// The value of a flag that stands alone.
    alone: Option<LitStr>,
    value_name: Option<Expr>,
    delimiter: Option<LitChar>,
    parse: Option<Path>,
    choices: Option<Expr>,
    /// The description in the short help.
    short: Option<LitStr>,
    /// The largest whole number.
    most: Option<Expr>,
    /// A variant of `ResumeClass`.
    resume: Option<Ident>,
    /// A variant of `ReplayClass`.
    replay: Option<Ident>,
}

impl Attributes {
    fn of(field: &Field) -> Result<Self> {
        let mut result = Self::default();
        for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("setting")) {
            attribute.parse_nested_meta(|meta| result.read(&meta))?;
        }
        Ok(result)
    }

    fn read(&mut self, meta: &ParseNestedMeta<'_>) -> Result<()> {
        let name = meta.path.get_ident().map(ToString::to_string).unwrap_or_default();
        let switch = |meta: &ParseNestedMeta<'_>| {
            if meta.input.peek(Token![=]) { Ok(meta.value()?.parse::<LitBool>()?.value) } else { Ok::<_, Error>(true) }
        };
        match name.as_str() {
            "flatten" => self.flatten = switch(meta)?,
            "positional" => self.positional = switch(meta)?,
            "required" => self.required = switch(meta)?,
            "hide" => self.hide = switch(meta)?,
            "several" => self.several = switch(meta)?,
            "equals" => self.equals = switch(meta)?,
            "unlisted" => self.unlisted = switch(meta)?,
            "heading" => self.heading = Some(meta.value()?.parse()?),
            "default" => self.default = Some(meta.value()?.parse()?),
            "alone" => self.alone = Some(meta.value()?.parse()?),
            "value_name" => self.value_name = Some(meta.value()?.parse()?),
            "delimiter" => self.delimiter = Some(meta.value()?.parse()?),
            "parse" => self.parse = Some(meta.value()?.parse()?),
            "choices" => self.choices = Some(meta.value()?.parse()?),
            "short" => self.short = Some(meta.value()?.parse()?),
            "most" => self.most = Some(meta.value()?.parse()?),
            "resume" => self.resume = Some(meta.value()?.parse()?),
            "replay" => self.replay = Some(meta.value()?.parse()?),
            "alias" => self.aliases.push(meta.value()?.parse::<LitStr>()?.value()),
            "aliases" => {
                let list;
                let value = meta.value()?;
                bracketed!(list in value);
                let list = Punctuated::<LitStr, Token![,]>::parse_terminated(&list)?;
                self.aliases.extend(list.iter().map(LitStr::value));
            }
            _ => return Err(meta.error("unknown name in `setting`")),
        }
        Ok(())
    }
}

/// The form of a field: how many values it has.
enum Form<'t> {
    /// A value, which has a default or is required.
    One(&'t Type),
    /// `true` or `false`, as a flag that may stand alone.
    Switch,
    /// A value, or none.
    Optional(&'t Type),
    /// Any number of values.
    List(&'t Type),
}

impl<'t> Form<'t> {
    fn of(field: &'t Type) -> Self {
        if let Some(value) = type_argument(field, "Option") {
            Self::Optional(value)
        } else if let Some(value) = type_argument(field, "Vec") {
            Self::List(value)
        } else if matches!(field, Type::Path(path) if path.path.is_ident("bool")) {
            Self::Switch
        } else {
            Self::One(field)
        }
    }
}

/// Returns the `T` of a type `name<T>`.
fn type_argument<'t>(field: &'t Type, name: &str) -> Option<&'t Type> {
    let Type::Path(path) = field else { return None };
    let last = path.path.segments.last().filter(|segment| segment.ident == name)?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first()? {
        GenericArgument::Type(value) => Some(value),
        _ => None,
    }
}

pub(crate) fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let fields = match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => &fields.named,
            _ => return Err(Error::new_spanned(&input.ident, "Settings: expected named fields")),
        },
        _ => return Err(Error::new_spanned(&input.ident, "Settings: expected a struct")),
    };
    let mut describes = Vec::new();
    let mut reads = Vec::new();
    for field in fields {
        let attributes = Attributes::of(field)?;
        let ident = field.ident.as_ref().ok_or_else(|| Error::new(field.span(), "expected a name"))?;
        if attributes.flatten {
            let group = &field.ty;
            describes.push(quote! { <#group as ::rlhf_base::schema::Settings>::describe(fields); });
            reads.push(quote! { #ident: ::rlhf_base::schema::Settings::read(values)? });
        } else {
            let (describe, read) = setting(field, ident, &attributes)?;
            describes.push(describe);
            reads.push(read);
        }
    }
    let ident = &input.ident;
    Ok(quote! {
        impl ::rlhf_base::schema::Settings for #ident {
            fn describe(fields: &mut ::std::vec::Vec<::rlhf_base::schema::Field>) {
                #(#describes)*
            }

            fn read(values: &::rlhf_base::schema::Values<'_>) -> ::rlhf_base::Result<Self> {
                Ok(Self { #(#reads),* })
            }
        }
    })
}

/// Returns the description of a setting, and the code that reads its value.
fn setting(field: &Field, ident: &Ident, attributes: &Attributes) -> Result<(TokenStream, TokenStream)> {
    let name = ident.to_string();
    let help = doc(&field.attrs);
    if help.is_empty() {
        return Err(Error::new_spanned(ident, "Settings: expected a doc comment, which is the help text"));
    }
    let form = Form::of(&field.ty);
    let value = match form {
        Form::One(value) | Form::Optional(value) | Form::List(value) => value,
        Form::Switch => &field.ty,
    };
    let default = default_code(&form, attributes);
    let parser = match (&attributes.parse, &form) {
        (Some(parser), _) => quote! { #parser },
        (None, Form::Optional(value)) => quote! { ::rlhf_base::schema::optional::<#value> },
        (None, _) => quote! { ::rlhf_base::schema::required::<#value> },
    };
    let (shape, read) = match form {
        Form::One(_) => (quote! { One }, quote! { one }),
        Form::Switch => (quote! { Switch }, quote! { one }),
        Form::Optional(_) => (quote! { Optional }, quote! { one }),
        Form::List(_) => (quote! { List }, quote! { many }),
    };
    let required = match form {
        Form::One(_) => attributes.default.is_none(),
        _ => attributes.required,
    };
    let choices = match &attributes.choices {
        Some(choices) => quote! { #choices },
        None => quote! { <#value as ::rlhf_base::schema::Setting>::choices() },
    };
    // The names of an optional value are in its help.
    let may_list = !attributes.unlisted && !matches!(form, Form::Optional(_));
    let value_name = match &attributes.value_name {
        Some(value_name) => value_name.to_token_stream(),
        None => quote! { <#value as ::rlhf_base::schema::Setting>::NAME },
    };
    let heading = attributes.heading.as_ref().map_or(quote! { "" }, ToTokens::to_token_stream);
    let alone = attributes.alone.as_ref().map_or(quote! { None }, |alone| quote! { Some(#alone) });
    let delimiter = attributes.delimiter.as_ref().map_or(quote! { None }, |letter| quote! { Some(#letter) });
    let short = attributes.short.as_ref().map_or(quote! { "" }, ToTokens::to_token_stream);
    let most = attributes.most.as_ref().map_or(quote! { ::rlhf_base::schema::MOST }, ToTokens::to_token_stream);
    let resume = class(attributes.resume.as_ref(), "ResumeClass");
    let replay = class(attributes.replay.as_ref(), "ReplayClass");
    let Attributes { aliases, positional, hide, several, equals, .. } = attributes;
    let describe = quote! {
        fields.push(::rlhf_base::schema::Field {
            name: #name,
            aliases: &[#(#aliases),*],
            help: #help,
            heading: #heading,
            value_name: #value_name,
            kind: <#value as ::rlhf_base::schema::Setting>::KIND,
            shape: ::rlhf_base::schema::Shape::#shape,
            default: #default,
            required: #required,
            positional: #positional,
            hidden: #hide,
            several: #several,
            equals: #equals,
            alone: #alone,
            delimiter: #delimiter,
            choices: #choices,
            listed: #may_list && <#value as ::rlhf_base::schema::Setting>::LISTED,
            check: |text| #parser(text).map(drop),
            short: #short,
            most: #most,
            resume: #resume,
            replay: #replay,
        });
    };
    let read = quote! { #ident: ::rlhf_base::schema::#read(values, #name, #default, #parser)? };
    Ok((describe, read))
}

/// Returns the code of a variant of the enum `name` of `rlhf_base::schema`, or of its default.
fn class(variant: Option<&Ident>, name: &str) -> TokenStream {
    let name = Ident::new(name, Span::call_site());
    match variant {
        Some(variant) => quote! { ::rlhf_base::schema::#name::#variant },
        None => quote! { ::core::default::Default::default() },
    }
}

/// Returns the code of the default, an `Option<String>` as it is written in a file or on a command line.
fn default_code(form: &Form<'_>, attributes: &Attributes) -> TokenStream {
    match (&attributes.default, form) {
        (Some(default), _) => quote! { Some((#default).to_string()) },
        (None, Form::Optional(_)) => quote! { Some(::rlhf_base::schema::NONE.to_string()) },
        (None, Form::Switch) => quote! { Some("false".to_string()) },
        (None, Form::One(_) | Form::List(_)) => quote! { None },
    }
}
