# Completion of verlc for bash: source it, or put it into /usr/share/bash-completion/completions/verlc. The program itself says
# what may stand for a word (verlc __complete), so that this is never older than the program. zsh: share/_verlc, fish:
# share/verlc.fish.

_verlc() {
    local line=${COMP_LINE:0:COMP_POINT} words cur
    read -ra words <<<"$line" # bash's own words end at = and :, verlc's do not
    [[ $line == *[[:space:]] ]] && words+=("")
    cur=${words[-1]}
    mapfile -t COMPREPLY < <("${words[0]/#\~/$HOME}" __complete "${words[@]:1}" 2>/dev/null)
    if ((${#COMPREPLY[@]} == 0)); then # a file name, of a value too
        compopt -o default 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "${cur#*=}")
    elif [[ ${COMPREPLY[0]} == *[=./] ]]; then
        compopt -o nospace 2>/dev/null
    fi
    [[ $cur == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}") # what bash has replaced is behind the =
}
complete -F _verlc verlc
