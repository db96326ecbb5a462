package argv

import (
	"fmt"
	"strings"
)

const program = "dlrover-run"

// Completion returns a completion script for bash, zsh or tcsh, made from opts. The underscored spellings are left out.
func Completion(shell string, opts []Option) (string, error) {
	switch shell {
	case "bash":
		return bashCompletion(opts), nil
	case "zsh":
		return zshCompletion(opts), nil
	case "tcsh":
		return tcshCompletion(opts), nil
	}
	return "", usageErrorf("no completion for shell %s: choose bash, zsh or tcsh", pyRepr(shell))
}

func takesFile(o Option) bool { return o.Meta == "PATH" || o.Meta == "DIR" }

// bashCompletion walks the words in front of the cursor to see whether the script is among them; the script's own
// arguments are files. bash splits words at "=" and ":", so "--tee=0:3" is five.
func bashCompletion(opts []Option) string {
	var names, valued, cases strings.Builder
	for _, o := range opts {
		forms := append(spellings(&o)[:1], shortForm(o)...)
		fmt.Fprintf(&names, " %s", strings.Join(forms, " "))
		if o.Kind == Flag || o.Kind == Optional {
			continue
		}
		pattern := strings.Join(append(spellings(&o), shortForm(o)...), "|")
		fmt.Fprintf(&valued, "|%s", pattern)
		switch {
		case len(o.Choices) > 0:
			fmt.Fprintf(&cases, "    %s) COMPREPLY=($(compgen -W '%s' -- \"$cur\")); return ;;\n",
				pattern, strings.Join(o.Choices, " "))
		case takesFile(o):
			fmt.Fprintf(&cases, "    %s) compopt -o default; return ;;\n", pattern)
		}
	}
	return fmt.Sprintf(`# bash completion for %[1]s
_dlrover_run() {
  local cur=${COMP_WORDS[COMP_CWORD]} opt= i w
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    w=${COMP_WORDS[i]}
    case $w in
    [=:]*) opt=${opt:-:}; continue ;;
    --) compopt -o default; return ;;
    %[2]s) opt=$w; continue ;;
    -*) opt= ;;
    *) [[ -n $opt ]] || { compopt -o default; return; }; opt= ;;
    esac
  done
  [[ $cur != '=' ]] || cur=
  case $opt in
%[3]s    ?*) return ;;
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W '%[4]s' -- "$cur"))
  else
    compopt -o default
  fi
}
complete -F _dlrover_run %[1]s
`, program, strings.TrimPrefix(valued.String(), "|"), cases.String(), strings.TrimSpace(names.String()))
}

func zshCompletion(opts []Option) string {
	escape := strings.NewReplacer(`'`, `'\''`, `[`, `\[`, `]`, `\]`, `:`, `\:`)
	var b strings.Builder
	fmt.Fprintf(&b, "#compdef %s\n_arguments -s -S -A '-*' \\\n", program)
	for _, o := range opts {
		help := "[" + escape.Replace(o.Usage) + "]"
		action := ""
		switch {
		case o.Kind == Flag || o.Kind == Optional:
		case len(o.Choices) > 0:
			action = ":" + escape.Replace(o.Meta) + ":(" + strings.Join(o.Choices, " ") + ")"
		case takesFile(o):
			action = ":" + escape.Replace(o.Meta) + ":_files"
		default:
			action = ":" + escape.Replace(o.Meta) + ": "
		}
		for _, form := range append(spellings(&o)[:1], shortForm(o)...) {
			if o.Kind == Optional {
				form += "=-"
			} else if o.Kind != Flag && strings.HasPrefix(form, "--") {
				form += "="
			} else if o.Kind != Flag {
				form += "+"
			}
			fmt.Fprintf(&b, "  '*%s%s%s' \\\n", form, help, action)
		}
	}
	return b.String() + "  '1:script:_files' '*::arguments:_files'\n"
}

func tcshCompletion(opts []Option) string {
	var names []string
	var b strings.Builder
	for _, o := range opts {
		names = append(names, o.Name)
		form := spellings(&o)[0]
		switch {
		case o.Kind == Flag || o.Kind == Optional:
		case len(o.Choices) > 0:
			fmt.Fprintf(&b, " \\\n  'n@%[1]s@(%[2]s)@' 'c@%[1]s=@(%[2]s)@'", form, strings.Join(o.Choices, " "))
		case takesFile(o):
			fmt.Fprintf(&b, " \\\n  'n@%[1]s@f@' 'c@%[1]s=@f@'", form)
		default:
			fmt.Fprintf(&b, " \\\n  'n@%[1]s@x:%[2]s@'", form, o.Meta)
		}
	}
	return fmt.Sprintf("complete %s%s \\\n  'c@--@(%s)@' \\\n  'p@*@f@'\n", program, b.String(), strings.Join(names, " "))
}

func shortForm(o Option) []string {
	if o.Short == 0 {
		return nil
	}
	return []string{"-" + string(rune(o.Short))}
}
