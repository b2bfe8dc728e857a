#!/bin/bash
# Written by kumi 0.1.0 for the run 'qwen3-8b-chat'. Edit it as you like.
# It starts the run on all hosts and stays until they end. Stop it, and the nodes save and end.
hosts=(gpu0 user@gpu1 10.0.0.3 gpu3)
options=(-p 2222 -i "$HOME"/.ssh/cluster)
head=$(ssh -G "${options[@]}" -- "${hosts[0]}" | sed -n 's/^hostname //p')
case $head in *:*) head="[$head]" ;; esac   # an IPv6 address

# The commands of a host. Their standard input stays open as long as this script lives.
node() {
    cd -- /shared/work || exit 2
    # Secrets come from a file that only its owner can use, by lines NAME=value. Nothing here prints them.
    secrets="$HOME"/.secrets.env
    mode=$(stat -L -c %a -- "$secrets") || exit 2
    case $mode in 600 | 400) ;; *) echo "$secrets has mode $mode; chmod 600 it" >&2; exit 2 ;; esac
    number=0
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        case $line in '' | '#'*) continue ;; esac
        [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || { echo "$secrets: line $number is not NAME=value" >&2; exit 2; }
        export "$line"
    done < "$secrets"
    source venv/bin/activate
    exec kumi train run.toml optim.lr=2e-5 --end-with-stdin
}

# ssh hands one text to a shell of the host.
quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

# A pipe with this script as its only writer: its end, however it comes, closes the hosts' standard input.
pipe=$(mktemp -d) && mkfifo "$pipe/stdin" && exec 9<> "$pipe/stdin" || exit 2
stopping=
trap 'stopping=1; exec 9>&-' INT TERM HUP

for ((attempt = 0; ; attempt++)); do
    jobs=()
    for ((i = 0; i < ${#hosts[@]}; i++)); do
        place="KUMI_HEAD=$(quoted "$head:29400") KUMI_NODES=${#hosts[@]} KUMI_NODE=$i"
        command="$(declare -f node); export $place; node"
        # Without -t: a terminal would end with the connection before the nodes have saved.
        ssh -T -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "${options[@]}" \
            -- "${hosts[i]}" "bash -c $(quoted "$command")" \
            < "$pipe/stdin" > >(sed -u "s/^/node $i  /" 9>&-) 2>&1 9>&- &
        jobs+=($!)
    done
    code=0
    for job in "${jobs[@]}"; do
        wait "$job"; ended=$?
        # A signal that the trap handles ends `wait`, not ssh.
        while [ "$ended" -gt 128 ] && kill -0 "$job" 2> /dev/null; do wait "$job"; ended=$?; done
        [ "$ended" = 255 ] && ended=7   # ssh itself failed: a lost node
        [ "$ended" -gt "$code" ] && code=$ended
    done
    echo "kumi: exit code $code after $attempt restarts, $(date '+%F %T')"
    # 7: a node was lost. Its run goes on from the last checkpoint.
    [ "$code" = 7 ] && [ -z "$stopping" ] && [ "$attempt" -lt 20 ] || break
    sleep 5
done
rm -rf -- "$pipe"
exit "$code"
