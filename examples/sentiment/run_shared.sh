# Code shared by the run.sh of this example and that of gpt2-sentiment, which source it with their own arguments.
#
# They set `default_out`, the folder of a run without --out; `kind`, the name of the example; and `options`, the flags that they
# take, each with a value: --seed, --out, and possibly others whose values are folders. This script stores each flag's value in
# a variable of its name, the program in `binary` and Python in `python`, and changes to the checkout's root.

usage() { # the comment on top of the script
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}
fail() {
    echo "run.sh: $1" >&2
    exit "${2:-1}"
}

binary= seed=1 out=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage; exit 0 ;;
    -*)
        option=${1%%=*}
        case $option in *[!a-z-]*) option= ;; esac
        case " $options " in *" $option "*) ;; *) option= ;; esac
        [ -n "$option" ] || fail "unknown option $1 (known: $(echo "$options" | sed 's/ /, /g'))" 2
        case $1 in
        *=*) value=${1#*=} ;;
        *)
            [ $# -ge 2 ] || fail "$option needs a $([ "$option" = --seed ] && echo number || echo folder)" 2
            value=$2
            shift
            ;;
        esac
        eval "${option#--}=\$value"
        ;;
    *) [ -z "$binary" ] || fail "two binaries given: $binary and $1" 2; binary=$1 ;;
    esac
    shift
done
[ -n "$binary" ] || { usage >&2; exit 2; }
case $seed in '' | *[!0-9]*) fail "--seed: expected a whole number, found '$seed'" 2 ;; esac
command -v "$binary" >/dev/null || fail "$binary: no such program; build it with: cargo build --release"
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python: not found; the summary needs Python 3.9 or newer"

# Configurations name files relative to the checkout's root; the caller's paths are relative to the caller's folder.
here=$(pwd)
cd "$(dirname "$0")/../.."
absolute() {
    case $1 in /*) echo "$1" ;; *) [ "$here" = "$(pwd)" ] && echo "$1" || echo "$here/$1" ;; esac
}
case $binary in */*) binary=$(absolute "$binary") ;; esac
if [ -n "$out" ]; then
    out=$(absolute "${out%/}")
    if [ -d "$out" ] && [ -n "$(ls -A "$out")" ] && [ ! -f "$out/timings.tsv" ]; then
        fail "$out: holds something that is no run of this $kind; name an empty or new folder"
    fi
else
    out=$default_out
fi
mkdir -p "$out"
rm -f "$out/before.jsonl" "$out/after.jsonl" "$out/summary.json" "$out/summary.md"
: >"$out/timings.tsv"

step() { # NAME EXPLANATION COMMAND...
    name=$1
    printf '\n== %s: %s\n' "$name" "$2"
    shift 2
    started=$(date +%s)
    "$@" || fail "step '$name' failed"
    printf '%s\t%s\n' "$name" "$(($(date +%s) - started))" >>"$out/timings.tsv"
}

conclude() { # SUMMARY STAGE: prints the summary and where the report of the stage is; exits as the summary does
    status=0
    "$python" "$1" "$out" || status=$?
    report=$out/$2/report.html
    [ ! -f "$report" ] || printf '\nLook at the run in a browser: %s\n' "$report"
    exit "$status"
}
