package argv

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNormalize(t *testing.T) {
	for _, tc := range []struct {
		name string
		argv string // separated by blanks, ~ standing for one inside an argument
		env  map[string]string
		want string
	}{
		{name: "script only", argv: "train.py", want: "-- train.py"},
		{name: "script arguments are not ours", argv: "--nnodes 2 train.py --nnodes 3 -h --nproc -- x",
			want: "--nnodes=2 -- train.py --nnodes 3 -h --nproc -- x"},
		{name: "underscores", argv: "--nproc_per_node=4 s", want: "--nproc-per-node=4 -- s"},
		{name: "unique prefix", argv: "--max-r 3 --redirect=3 s", want: "--max-restarts=3 --redirects=3 -- s"},
		{name: "torchrun's abbreviations win over additions", argv: "--t 3 --re 1 --ro a s",
			want: "--tee=3 --redirects=1 --role=a -- s"},
		{name: "additions can be abbreviated", argv: "--dry- --metrics_a :9 --prec 0 s",
			want: "--dry-run --metrics-addr=:9 --precheck=0 -- s"},
		{name: "last one wins in first place", argv: "--nnodes 1 --role a --nnodes=2 s", want: "--nnodes=2 --role=a -- s"},
		{name: "short", argv: "-r3 -t 2 -m s", want: "--redirects=3 --tee=2 --module -- s"},
		{name: "short with equals", argv: "-r=3 -t0:1,1:3 s", want: "--redirects=3 --tee=0:1,1:3 -- s"},
		{name: "cluster", argv: "-mr3 s", want: "--module --redirects=3 -- s"},
		{name: "cluster with equals", argv: "-mr=3 s", want: "--module --redirects=3 -- s"},
		{name: "cluster with next argument", argv: "-mmr 3 s", want: "--module --redirects=3 -- s"},
		{name: "empty values", argv: "--rdzv-id= --role=  s", want: "--rdzv-id= --role= --  s"},
		{name: "value with equals", argv: "--rdzv-conf=a=1,b=2 s", want: "--rdzv-conf=a=1,b=2 -- s"},
		{name: "negative numbers are values", argv: "--max-restarts -1 --nnodes -.5 s",
			want: "--max-restarts=-1 --nnodes=-.5 -- s"},
		{name: "negative number as script", argv: "-1 a", want: "-- -1 a"},
		{name: "value with a blank may begin with a dash", argv: "--role -a~b s", want: "--role=-a~b -- s"},
		{name: "integers as in Python", argv: "--max-restarts ~+0_10 s", want: "--max-restarts=10 -- s"},
		{name: "floats as in Python", argv: "--monitor-interval 1_0.50 s", want: "--monitor-interval=10.5 -- s"},
		{name: "durations", argv: "--deadline=2m --leave-grace 90 --shutdown-timeout 1h30m --restart-grace=10ms s",
			want: "--deadline=120 --leave-grace=90 --shutdown-timeout=5400 --restart-grace=0.01 -- s"},
		{name: "infinite float", argv: "--monitor-interval 1e999 s", want: "--monitor-interval=+Inf -- s"},
		{name: "double dash before script", argv: "-m -- mod --x", want: "--module -- mod --x"},
		{name: "double dash makes an option the script", argv: "-- --standalone", want: "-- --standalone"},
		{name: "double dash after script is dropped", argv: "s -- --x -- y", want: "-- s --x -- y"},
		{name: "double dash after script is kept after an earlier one", argv: "-- s -- --x", want: "-- s -- --x"},
		{name: "lone dash is a script", argv: "- a", want: "-- - a"},
		{name: "pairs", argv: "--box-pairs 0:1 2:4,3:5 --box_pairs=6:7 s", want: "--box-pairs=0:1,2:4,3:5,6:7 -- s"},
		{name: "pairs stop at the script", argv: "--box-pairs 0:1 train.py 2:4", want: "--box-pairs=0:1 -- train.py 2:4"},
		{name: "ring", argv: "--box-pairs ring 0:1", want: "--box-pairs=ring -- 0:1"},
		{name: "attached ring", argv: "--box-pairs=ring s", want: "--box-pairs=ring -- s"},
		{name: "pairs stop at ring", argv: "--box-pairs 0:1 ring", want: "--box-pairs=0:1 -- ring"},
		{name: "attached pairs end", argv: "--box-pairs=0:1 2:4", want: "--box-pairs=0:1 -- 2:4"},
		{name: "DLRover's spellings", argv: "--auto_config --auto-tunning --node_unit 4 s",
			want: "--auto-config --auto-tunning --node-unit=4 -- s"},

		{name: "environment", argv: "--role a s",
			env:  map[string]string{"PET_NNODES": "1:4", "PET_ROLE": "b", "PET_MAX_RESTARTS": "03"},
			want: "--role=a --nnodes=1:4 --max-restarts=3 -- s"},
		{name: "empty variable is a value", argv: "s", env: map[string]string{"PET_RDZV_ID": ""}, want: "--rdzv-id= -- s"},
		{name: "flag variables are integers", argv: "s",
			env:  map[string]string{"PET_MODULE": "2", "PET_STANDALONE": " 0 ", "PET_NO_PYTHON": "-1"},
			want: "--module --no-python -- s"},
		{name: "flag on the line beats 0", argv: "--module s",
			env: map[string]string{"PET_MODULE": "0"}, want: "--module -- s"},
		{name: "choices of torchrun do not hold for variables", argv: "s",
			env:  map[string]string{"PET_START_METHOD": "thread"},
			want: "--start-method=thread -- s"},
		{name: "options without a variable", argv: "s",
			env: map[string]string{"PET_LOGS_SPECS": "a", "PET_NUMA_BINDING": "node",
				"PET_BOX_PAIRS": "0:1", "PET_TOKEN_FILE": "f", "PET_HELP": "1", "PET_VERSION": "1"}, want: "-- s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Normalize(available(), words(tc.argv), lookup(tc.env))
			require.NoError(t, err)
			require.Equal(t, words(tc.want), got)
		})
	}
}

func words(s string) []string {
	list := strings.Split(s, " ")
	for i := range list {
		list[i] = strings.ReplaceAll(list[i], "~", " ")
	}
	return list
}

func TestNormalizeRefuses(t *testing.T) {
	for _, tc := range []struct {
		name, argv, env, want string // env is NAME=VALUE
	}{
		{name: "nothing", argv: "--standalone", want: "the following arguments are required: training_script"},
		{name: "two spellings", argv: "--nproc 4 s",
			want: "ambiguous option: --nproc could match --nproc-per-node, --nproc_per_node"},
		{name: "ambiguous with value", argv: "--max=4 s",
			want: "ambiguous option: --max=4 could match --max-restarts, --max_restarts"},
		{name: "no value", argv: "--nnodes --standalone s", want: "argument --nnodes: expected one argument"},
		{name: "no value at the end", argv: "--nproc-per-node",
			want: "argument --nproc-per-node/--nproc_per_node: expected one argument"},
		{name: "no value before a double dash", argv: "--nnodes -- 2 s", want: "argument --nnodes: expected one argument"},
		{name: "flag with value", argv: "--standalone=1 s", want: "argument --standalone: ignored explicit argument '1'"},
		{name: "flag with empty value", argv: "--standalone= s", want: "argument --standalone: ignored explicit argument ''"},
		{name: "short flag with value", argv: "-m=r3 s", want: "argument -m/--module: ignored explicit argument 'r3'"},
		{name: "unknown letter", argv: "-mx s", want: "argument -m/--module: ignored explicit argument 'x'"},
		{name: "help with value", argv: "--help=1 s", want: "argument -h/--help: ignored explicit argument '1'"},
		{name: "int", argv: "--max-restarts it's s",
			want: `argument --max-restarts/--max_restarts: invalid int value: "it's"`},
		{name: "int beyond 64 bits", argv: "--max-restarts 9223372036854775808 s",
			want: "argument --max-restarts/--max_restarts: invalid int value: '9223372036854775808'"},
		{name: "float", argv: "--monitor-interval 0x1p4 s",
			want: "argument --monitor-interval/--monitor_interval: invalid duration: '0x1p4' (want 90s, 2m or 1h30m; a " +
				"plain number is in seconds)"},
		{name: "duration", argv: "--deadline soon s",
			want: "argument --deadline: invalid duration: 'soon' (want 90s, 2m or 1h30m; a plain number is in seconds)"},
		{name: "choice", argv: "--start-method thread s", want: "argument --start-method/--start_method: " +
			"invalid choice: 'thread' (choose from 'spawn', 'fork', 'forkserver')"},
		{name: "int choice", argv: "--precheck 3 s", want: "argument --precheck: invalid choice: 3 (choose from 0, 1, 2)"},
		{name: "every use is checked", argv: "--max-restarts x --max-restarts 1 s",
			want: "argument --max-restarts/--max_restarts: invalid int value: 'x'"},

		{name: "unknown", argv: "--frobnicate s", want: "unrecognized arguments: --frobnicate"},
		{name: "typing errors", argv: "--nporc_per_node=4 --stanalone s",
			want: "unrecognized arguments: --nporc_per_node=4 --stanalone (did you mean --nproc-per-node, --standalone?)"},
		{name: "one dash", argv: "-nproc-per-node 4 s",
			want: "unrecognized arguments: -nproc-per-node (did you mean --nproc-per-node?)"},
		{name: "unknown before missing script", argv: "--wolrd", want: "unrecognized arguments: --wolrd"},
		{name: "use-env", argv: "--use_env s", want: "unrecognized arguments: --use_env (--use-env belongs to " +
			"torch.distributed.launch; remove it, workers always find their ranks in the environment)"},
		{name: "option and value in one word", argv: "--nnodes~4 s", want: "argument '--nnodes 4' is one word: " +
			"give the option and its value as two arguments, or join them with '='"},

		{name: "flag variable", argv: "s", env: "PET_STANDALONE=true", want: "environment variable PET_STANDALONE='true', " +
			"default of --standalone: the variable of a flag must be an integer, 0 for off and any other for on"},
		{name: "int variable", argv: "s", env: "PET_MAX_RESTARTS=", want: "environment variable PET_MAX_RESTARTS='', " +
			"default of --max-restarts: invalid int value: ''"},
		{name: "our choices hold for variables", argv: "s", env: "PET_RESTART_POLICY=never",
			want: "environment variable PET_RESTART_POLICY='never', default of --restart-policy: " +
				"invalid choice: 'never' (choose from 'OnFailure', 'Never', 'Always', 'ExitCode')"},

		{name: "precheck by variable", argv: "s", env: "PET_PRECHECK=3", want: "environment variable PET_PRECHECK='3', " +
			"default of --precheck: invalid choice: 3 (choose from 0, 1, 2)"},
		{name: "no script", argv: "--network-check", want: "the following arguments are required: training_script"},
		{name: "logs specs", argv: "--logs-specs mine s",
			want: "argument --logs-specs/--logs_specs: 'mine' would be a Python entry point, " +
				"which this launcher cannot load; remove it and use --log-dir, --redirects and --tee"},
		{name: "Python event handler", argv: "--event-log-handler mine s",
			want: "argument --event-log-handler/--event_log_handler: 'mine' would be a Python handler, " +
				"which this launcher cannot load; use null or console, or --event-log for a file"},
		{name: "no pairs", argv: "--box-pairs train.py",
			want: "argument --box-pairs/--box_pairs: expected at least one argument"},
		{name: "bad pairs", argv: "--box-pairs=0:1,2 s",
			want: "argument --box-pairs/--box_pairs: invalid pair list: '0:1,2' (want A:B[,A:B...], or ring)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name, value, set := strings.Cut(tc.env, "=")
			env := map[string]string{}
			if set {
				env[name] = value
			}
			_, err := Normalize(Options(), words(tc.argv), lookup(env))
			var usage *UsageError
			require.ErrorAs(t, err, &usage)
			require.Equal(t, tc.want, usage.Msg)
		})
	}
}

func TestNormalizeAllows(t *testing.T) {
	env := map[string]string{"PET_NETWORK_CHECK": "0", "PET_PRECHECK": "0", "PET_EVENT_LOG_HANDLER": "console"}
	got, err := Normalize(Options(), words("--precheck 0 --accelerator metax-tech.com/gpu s"), lookup(env))
	require.NoError(t, err)
	require.Equal(t, words("--precheck=0 --accelerator=metax-tech.com/gpu --event-log-handler=console -- s"), got)

	line, err := Parse(Options(), words("--check-only"), nil)
	require.NoError(t, err, "there is nothing to run")
	require.Empty(t, line.Args())
}

func TestNormalizeRequests(t *testing.T) {
	for _, tc := range []struct {
		argv string
		want error
	}{
		{"-h", ErrHelp},
		{"--he", ErrHelp},
		{"--nnodes 2 -mh --nope", ErrHelp},
		{"--nope --network-check --help", ErrHelp},
		{"--version --nope", ErrVersion},
		{"--vers", ErrVersion},
		{"--print-completion=zsh", &CompletionRequest{Shell: "zsh"}},
		{"--print_completion tcsh --nope", &CompletionRequest{Shell: "tcsh"}},
	} {
		_, err := Normalize(Options(), words(tc.argv), nil)
		require.Equal(t, tc.want, err, tc.argv)
	}
	_, err := Normalize(Options(), words("--max-restarts x -h"), nil)
	require.ErrorContains(t, err, "invalid int value", "an error in front of -h counts")
	_, err = Normalize(Options(), words("s -h --version"), nil)
	require.NoError(t, err, "behind the script they are the script's")
}

func TestNormalizeAliases(t *testing.T) {
	opts := []Option{{Name: "one-two", Aliases: []string{"first", "uno"}}}
	got, err := Normalize(opts, words("--uno 1 --fir=2 s"), nil)
	require.NoError(t, err)
	require.Equal(t, words("--one-two=2 -- s"), got)
	_, err = Normalize(opts, words("--one-two"), nil)
	require.EqualError(t, err, "argument --one-two/--one_two/--first/--uno: expected one argument")
}

func TestOptionsTable(t *testing.T) {
	opts := Options()
	seen, sections, last := map[string]string{}, map[string]bool{}, ""
	for _, o := range opts {
		t.Run(o.Name, func(t *testing.T) {
			for _, s := range spellings(&o) {
				require.Empty(t, seen[s], "spelling %s is taken", s)
				seen[s] = o.Name
			}
			if o.Short != 0 {
				require.Empty(t, seen[string(rune(o.Short))])
				seen[string(rune(o.Short))] = o.Name
			}
			require.NotContains(t, o.Name, "_")
			require.NotEmpty(t, o.Usage)
			require.NotContains(t, o.Usage, "`", "urfave/cli takes what is in backquotes for the placeholder")
			require.Equal(t, o.Kind == Flag, o.Meta == "", "values have placeholders, flags have none")
			if o.Category != last {
				require.False(t, sections[o.Category], "section %s comes twice", o.Category)
				sections[o.Category], last = true, o.Category
			}
			if o.Kind == Flag {
				require.Empty(t, o.Default)
			} else if o.Default != "" {
				value, err := convert(&o, o.Default)
				require.NoError(t, err)
				require.Equal(t, o.Default, value)
				require.NoError(t, checkChoice(&o, value))
				if o.Check != nil {
					require.NoError(t, o.Check(value), "the default must be usable")
				}
			}
			for _, s := range o.Others {
				require.NotContains(t, o.Choices, s.Word)
				require.Contains(t, o.Choices, s.Means)
				require.Contains(t, o.Usage, s.Word+" ("+s.Means+")")
			}
		})
	}
	opts[0].Name = "changed"
	require.NotEqual(t, "changed", Options()[0].Name, "each call returns a table of its own")
}

// Words of other systems are those that we have for them, on the command line and in variables.
func TestWordsOfOthers(t *testing.T) {
	for _, c := range [][3]string{
		{"clean-up", "None", "none"}, {"clean-up", "All", "all"}, {"clean-up", "Unfinished", "unfinished"},
		{"clean-up", "Running", "unfinished"}, {"success-rule", "AllWorkers", "all"}, {"restart-policy", "Never", "Never"},
	} {
		l, err := Parse(Options(), []string{"--" + c[0] + "=" + c[1], "train.py"}, nil)
		require.NoError(t, err)
		require.Equal(t, c[2], l.String(c[0]))
		l, err = Parse(Options(), []string{"train.py"}, func(name string) (string, bool) {
			return c[1], name == "PET_"+strings.ToUpper(strings.ReplaceAll(c[0], "-", "_"))
		})
		require.NoError(t, err)
		require.Equal(t, c[2], l.String(c[0]))
	}
	_, err := Parse(Options(), []string{"--clean-up=none ", "train.py"}, nil)
	require.ErrorContains(t, err, "invalid choice: 'none ' (choose from 'none', 'unfinished', 'all')")
	_, err = Parse(Options(), []string{"--clean-up=NONE", "train.py"}, nil)
	require.Error(t, err)
}

func TestRepeatedOption(t *testing.T) {
	env := func(name string) (string, bool) {
		return map[string]string{"PET_LOG_RULE": "c:d\n\ne:f"}[name], name == "PET_LOG_RULE"
	}
	line, err := Parse(Options(), []string{"--log-rule=a:x", "--log_rule", "b:y:every=5s", "train.py"}, env)
	require.NoError(t, err)
	require.Equal(t, []string{"a:x", "b:y:every=5s"}, line.Strings("log-rule"), "the command line counts alone")
	line, err = Parse(Options(), []string{"train.py"}, env)
	require.NoError(t, err)
	require.Equal(t, []string{"c:d", "e:f"}, line.Strings("log-rule"))
	line, err = Parse(Options(), []string{"train.py"}, nil)
	require.NoError(t, err)
	require.Empty(t, line.Strings("log-rule"))
}

func TestOptionalValue(t *testing.T) {
	for args, want := range map[string]string{
		"--warm train.py":            "auto",
		"--warm=torch,numpy s":       "torch,numpy",
		"--warm --warm=off s --warm": "off",
		"s --warm":                   "off",
		"--warm= s":                  "",
	} {
		line, err := Parse(Options(), words(args), nil)
		require.NoError(t, err)
		require.Equal(t, want, line.String("warm"), args)
	}
	line, err := Parse(Options(), words("s"), lookup(map[string]string{"PET_WARM": "numpy"}))
	require.NoError(t, err)
	require.Equal(t, "numpy", line.String("warm"))
}
