//! Checks that the bound on libgomp's spinning is in effect before `main`, and that the user's setting takes precedence.

use std::process::Command;

const CHILD: &str = "TCH_EXT_SPIN_CHILD";

/// Restarts this program with these variables; returns the result of `bound_spinning`.
fn in_a_child(variables: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "the_bound_is_set_before_main_unless_the_user_has_set_it", "--nocapture"]);
    child.env_remove("GOMP_SPINCOUNT").env_remove("OMP_WAIT_POLICY").env(CHILD, "1");
    let output = child.envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| Some(line.split_once("bound: ")?.1.to_string())).unwrap()
}

#[test]
fn the_bound_is_set_before_main_unless_the_user_has_set_it() {
    let bound = tch_ext::bound_spinning();
    if std::env::var_os(CHILD).is_some() {
        #[expect(clippy::print_stdout, reason = "the parent process reads it")]
        {
            println!("bound: {bound:?}");
        }
        return;
    }
    assert_eq!(in_a_child(&[]), "Some(10000)");
    assert_eq!(in_a_child(&[("GOMP_SPINCOUNT", "7")]), "Some(7)");
    assert_eq!(in_a_child(&[("OMP_WAIT_POLICY", "active")]), "None");
}
