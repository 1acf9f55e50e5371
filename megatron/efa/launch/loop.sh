# Attempts until training is done. Set before: run (the run's folder), nodes, restarts (at most),
# step (a function: one attempt, on all nodes) and requeue (a function: queue the job again).
# Needs nothing of Python: it also runs beside containers, on the host.

say() { echo "megatron-efa: $*" >&2; }

finish() { # STATE CODE
    echo "$1 $2" >"$run/.state" && mv "$run/.state" "$run/state"
    exit "$2"
}

# The launchers on the nodes see the file, and the ranks save a checkpoint and end with 0.
announced=
interrupted=
announce() {
    announced=1
    interrupted=1
    touch "$run/stop"
    say "asked the ranks to save a checkpoint and end"
}
trap announce USR1 TERM
trap 'kill "$pid" 2>/dev/null; wait "$pid"; finish stopped 130' INT

attempt=0
for folder in "$run"/attempts/*/; do
    [ -d "$folder" ] && [ "$(basename "$folder")" -gt "$attempt" ] && attempt=$(basename "$folder")
done
rm -f "$run/stop"
failures=0

while :; do
    attempt=$((attempt + 1))
    folder=$run/attempts/$attempt
    mkdir -p "$folder" || finish failed 2
    echo "running 0" >"$run/state"
    step "$attempt" &
    pid=$!
    while :; do
        interrupted=
        wait "$pid"
        code=$?
        [ -n "$interrupted" ] || break # a trap ends `wait` before its process ends
    done
    codes=" $(for file in "$folder"/failed-code-*; do
        [ -e "$file" ] && basename "$file"
    done | sed 's/^failed-code-\([0-9]*\)-.*/\1/' | sort -nu | tr '\n' ' ')"
    who=$(cd "$folder" && ls -tr | sed -n 's/^failed-code-[0-9]*-\(.*\)/\1/p' | head -n 1)
    if [ "$code" = 0 ] && [ "$codes" = " " ]; then
        if [ -n "$announced" ]; then
            say "attempt $attempt ended early, after a checkpoint"
            echo "requeued 0" >"$run/state"
            requeue || finish stopped 0
            exit 0
        fi
        finish done 0
    fi
    case $codes in
    *" 17 "*) # the rerun machine: a step's result is wrong each time
        say "attempt $attempt failed validation of its results (exit code 17): a GPU of ${who:-a node} computes wrongly, take that node out and launch again"
        finish failed 17
        ;;
    *" 2 "*) # an argument is wrong: it will be so again
        say "attempt $attempt was refused (${who:-a rank}): see what it says in $folder"
        finish failed 2
        ;;
    *" 3 "*)
        say "attempt $attempt did not pass its preflight checks (${who:-a node}): see what they say in $folder"
        finish failed 3
        ;;
    *" 16 "*) # the rerun machine: another run of the same step tells a broken GPU from a glitch
        say "attempt $attempt ended to repeat a doubtful step (exit code 16)"
        doubts=$((${doubts:-0} + 1))
        [ "$doubts" -le 3 ] || finish failed 16
        ;;
    *)
        failures=$((failures + 1))
        [ "$code" != 0 ] || code=1
        say "attempt $attempt failed (${who:-its step ended with $code}), $failures of at most $((restarts + 1))"
        [ "$failures" -le "$restarts" ] || finish failed "$code"
        ;;
    esac
    [ -z "$announced" ] || finish stopped "$code"
done
