# Completion of verlc for bash (source it, or put it into /usr/share/bash-completion/completions/verlc) and for zsh
# (autoload -U +X bashcompinit && bashcompinit first).  It asks the program itself: commands and options from --help, keys from
# --help PREFIX, so that it is never older than the program.

_verlc_words() { # the words that stand first in the lines of a help text
    sed -n 's/^  \(-\{0,2\}[a-z][a-z0-9-]*\).*/\1/p'
}

_verlc() {
    local cur=${COMP_WORDS[COMP_CWORD]} program=${COMP_WORDS[0]} line=$COMP_LINE command words
    # bash splits at = and :, verlc's keys have neither before their value
    cur=${line:0:COMP_POINT}; cur=${cur##* }
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        words=$("$program" --help 2>/dev/null | _verlc_words)
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
        return
    fi
    command=${COMP_WORDS[1]}
    case $cur in
    *=*) # a value: a file name
        compopt -o default 2>/dev/null
        COMPREPLY=($(compgen -f -- "${cur#*=}"))
        return ;;
    -*)
        words=$("$program" "$command" --help 2>/dev/null | _verlc_words)
        [[ ${COMP_WORDS[2]} != -* ]] && words="$words $("$program" "$command" "${COMP_WORDS[2]}" --help 2>/dev/null | _verlc_words)"
        case $command in ppo | sft | plan) words="$words --help --cfg --config-path --config-name" ;; esac
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
        return ;;
    esac
    case $command in
    ppo | plan) words=$("$program" ppo --help "${cur:-all}" 2>/dev/null | sed -n 's/^+\{0,1\}\([a-z_][A-Za-z0-9_.]*\)=.*/\1=/p') ;;
    sft) words=$("$program" sft --help "${cur:-all}" 2>/dev/null | sed -n 's/^+\{0,1\}\([a-z_][A-Za-z0-9_.]*\)=.*/\1=/p') ;;
    explain) words=$("$program" explain --markdown 2>/dev/null | sed -n 's/^| `\([^`*]*\)`.*/\1/p') ;;
    model) words="init info export merge" ;;
    trackers) # sync, or a run
        compopt -o default 2>/dev/null
        ((COMP_CWORD == 2)) && words=sync
        COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
        return ;;
    show | status | grep | view) # a run
        compopt -o default 2>/dev/null
        COMPREPLY=($(compgen -f -- "$cur"))
        return ;;
    model_merger) words="merge test" ;;
    *) words=$("$program" "$command" --help 2>/dev/null | _verlc_words) ;;
    esac
    compopt -o nospace 2>/dev/null
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -F _verlc verlc
