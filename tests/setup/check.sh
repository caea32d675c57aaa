# Sourced by the tests beside it: counts their checks.
passed=0
failed=0

# check NAME CONDITION...: the condition is a command. A failure prints it with the exit code, output and errors in rc, out and err.
check() {
    local name=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED: %s\n    %s\n    exit code %s\n    out: %s\n    err: %s\n' "$name" "$*" "${rc-}" "${out-}" "${err-}"
    fi
}

# check_summary WHAT: prints the counts; fails if a check failed.
check_summary() {
    echo "$1 tests: $passed passed, $failed failed"
    [ $failed = 0 ]
}
