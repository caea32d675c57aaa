//! The program `rlhf`.

fn main() {
    rlhf_cli::run(std::env::args_os().collect());
}
