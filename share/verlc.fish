# Completion of verlc for fish: put it into ~/.config/fish/completions. See share/verlc.bash.

function __verlc_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    set -l found ($words[1] __complete $words[2..-1] "$word" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else if string match -q '*=*' -- $word # a value: a file name behind the =
        set -l parts (string split -m 1 = -- $word)
        for path in (__fish_complete_path $parts[2])
            printf '%s=%s\n' $parts[1] $path
        end
    else
        __fish_complete_path $word
    end
end
complete -c verlc -f -a '(__verlc_complete)'
