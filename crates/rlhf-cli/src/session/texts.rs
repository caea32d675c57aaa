//! Texts and token ids.

use super::failure::Failure;
use super::params::Params;
use super::wire::Reply;
use rlhf::Result;
use rlhf::tokenizer::Tokenizer;

/// Answers `encode`, texts as ids, and `decode`, ids as texts.
pub(super) fn text(tokenizer: &Tokenizer, method: &str, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
    if method == "encode" {
        let texts = params.needed("texts", Params::texts)?;
        params.finish(method)?;
        let rows: Vec<Vec<i64>> = texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<_>>()?;
        reply.id_rows("ids", &rows);
    } else {
        let rows = params.needed("ids", Params::rows)?;
        params.finish(method)?;
        let texts: Vec<String> = rows.iter().map(|row| tokenizer.decode(row)).collect::<Result<_>>()?;
        reply.set("texts", texts);
    }
    Ok(())
}
