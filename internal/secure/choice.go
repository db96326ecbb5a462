package secure

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
)

// Choice is the user's: the values of --tls, --tls-cert, --tls-key and --tls-ca.
type Choice struct {
	Auto bool   `json:"auto,omitempty"` // the job token decides
	Cert string `json:"cert,omitempty"` // path of this program's certificate, and of those between it and an authority
	Key  string `json:"key,omitempty"`  // path of its private key
	CA   string `json:"ca,omitempty"`   // path of the authorities that the other side's certificate is to be of
}

// Variables are those that count where an option is not given, in the order of Choice.
var Variables = [...]string{"DLROVER_TLS", "DLROVER_TLS_CERT", "DLROVER_TLS_KEY", "DLROVER_TLS_CA"}

// Chosen reads the options, and where none is given the variables.
func Chosen(option func(name string) string, env func(string) (string, bool)) (c Choice, err error) {
	mode, from := option("tls"), "--tls"
	if mode == "" {
		mode, _ = env(Variables[0])
		from = Variables[0]
	}
	c.Cert, c.Key, c.CA = option("tls-cert"), option("tls-key"), option("tls-ca")
	if c == (Choice{}) {
		c.Cert, _ = env(Variables[1])
		c.Key, _ = env(Variables[2])
		c.CA, _ = env(Variables[3])
	}
	switch mode {
	case "":
	case "off":
		c = Choice{}
	case "auto":
		if c != (Choice{}) {
			return c, fmt.Errorf("%s=auto derives certificates from the job token, and takes no files: leave out either "+
				"it, or --tls-cert, --tls-key and --tls-ca (DLROVER_TLS_CERT, DLROVER_TLS_KEY, DLROVER_TLS_CA)", from)
		}
		c.Auto = true
	default:
		return c, fmt.Errorf("%s=%s: need auto or off; certificates of your own need --tls-cert, --tls-key and --tls-ca "+
			"alone", from, mode)
	}
	if (c.Cert == "") != (c.Key == "") {
		return c, errors.New("--tls-cert and --tls-key belong together: give both or none (DLROVER_TLS_CERT, " +
			"DLROVER_TLS_KEY)")
	}
	for _, path := range []*string{&c.Cert, &c.Key, &c.CA} {
		if *path != "" && err == nil {
			*path, err = filepath.Abs(*path) // for programs that this one starts elsewhere
		}
	}
	return c, err
}

// On reports whether connections speak TLS.
func (c Choice) On() bool { return c != Choice{} }

// Environ has the choice as variables of the environment, for a program that this one starts.
func (c Choice) Environ() (env []string) {
	mode := "off"
	switch {
	case c.Auto:
		mode = "auto"
	case c.On():
		mode = ""
	}
	for i, value := range [...]string{mode, c.Cert, c.Key, c.CA} {
		if value != "" {
			env = append(env, Variables[i]+"="+value)
		}
	}
	return env
}

// Side is what a program does with connections.
type Side int

const (
	Asks   Side = 1 << iota // it connects to servers
	Serves                  // it serves others
)

// Layer reads the files, or derives keys from the job tokens; nil: there is no TLS. Later changes count, too; log hears
// of those that cannot be used. A program takes all tokens, as token.Job.Accepted has them.
func (c Choice) Layer(tokens func() []string, side Side, log *slog.Logger) (*Layer, error) {
	l := &Layer{choice: c, log: log, tokens: tokens}
	var err error
	switch {
	case !c.On():
		return nil, nil
	case c.Auto:
		if l.known = tokens(); len(l.known) == 0 {
			l.known = []string{""} // an error says what is needed
		}
		l.id, err = ofTokens(l.known)
		return l, err
	case side&Asks != 0 && c.CA == "":
		return nil, errors.New("--tls-cert without --tls-ca: give the authority that has signed the servers' certificates " +
			"(DLROVER_TLS_CA)")
	}
	if l.id, err = l.read(); err == nil && side&Serves != 0 {
		err = l.Serves()
	}
	return l, err
}

// Serves returns why a program with this Layer cannot serve others.
func (l *Layer) Serves() error {
	if l == nil || l.choice.Auto || l.choice.Cert != "" {
		return nil
	}
	return errors.New("--tls-ca alone is for clients, and this program serves others: give it --tls-cert and --tls-key, " +
		"too (DLROVER_TLS_CERT, DLROVER_TLS_KEY)")
}
