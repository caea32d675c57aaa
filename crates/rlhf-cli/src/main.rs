//! The program `rlhf`.

fn main() {
    rlhf_cli::main();
}
