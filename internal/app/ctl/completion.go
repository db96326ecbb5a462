package ctl

import (
	"fmt"
	"strings"
)

// completions are the completion scripts. Each asks the program for the words that may follow a command line.
var completions = []struct{ shell, script string }{
	{"bash", `_dlroverctl() {
  local words=("${COMP_WORDS[@]:0:$COMP_CWORD}")
  case $2 in
  --) words+=(-) ;;
  -*) words+=("$2") ;;
  esac
  COMPREPLY=($(compgen -W "$("${words[@]}" --generate-bash-completion 2>/dev/null)" -- "$2"))
}
complete -o default -F _dlroverctl dlroverctl
`},
	{"zsh", `#compdef dlroverctl
_dlroverctl() {
  local -a line=("${(@)words[1,CURRENT-1]}") found
  case $PREFIX in
  --) line+=(-) ;;
  -*) line+=("$PREFIX") ;;
  esac
  found=(${(f)"$("${line[@]}" --generate-bash-completion 2>/dev/null)"})
  compadd -a found || _files
}
if [[ $funcstack[1] == _dlroverctl ]]; then
  _dlroverctl "$@"
else
  compdef _dlroverctl dlroverctl
fi
`},
	{"fish", `function __dlroverctl_words
  set -l line (commandline -opc)
  set -l word (commandline -ct)
  switch $word
    case --
      set -a line -
    case '-*'
      set -a line $word
  end
  command $line --generate-bash-completion 2>/dev/null
end
complete -c dlroverctl -a '(__dlroverctl_words)'
`},
}

// shells names the shells of completions, as text for people.
func shells() string {
	var names []string
	for _, c := range completions {
		names = append(names, c.shell)
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// completion is the script for a shell.
func completion(shell string) (script string, err error) {
	for _, c := range completions {
		if c.shell == shell {
			return c.script, nil
		}
	}
	return "", fmt.Errorf("--print-completion=%s: choose %s", shell, shells())
}
