package master

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/openfile"
)

// etcdFlags are the options of an election in etcd.
func etcdFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "etcd", Category: severalMasters,
			Usage: "`HOST:PORT,...`: etcd, 3.4 or newer, in which masters elect the one that serves. The others wait, and " +
				"do not listen (default: this is the only master)"},
		&cli.StringFlag{Name: "etcd-prefix", Category: severalMasters, Value: "/dlrover",
			Usage: "`KEY`: prefix of the keys; all masters of an election have the same (default: /dlrover)"},
		&cli.StringFlag{Name: "etcd-ca", Category: severalMasters,
			Usage: "`PATH`: certificates that prove etcd's identity; with this or --etcd-cert the connection is encrypted"},
		&cli.StringFlag{Name: "etcd-cert", Category: severalMasters,
			Usage: "`PATH`: certificate of this client, with its --etcd-key"},
		&cli.StringFlag{Name: "etcd-key", Category: severalMasters, Usage: "`PATH`: private key of --etcd-cert"},
		&cli.StringFlag{Name: "etcd-user", Category: severalMasters, Usage: "`NAME`: user, with --etcd-password-file"},
		&cli.StringFlag{Name: "etcd-password-file", Category: severalMasters, Usage: "`PATH`: file with the user's password"},
	}
}

// maxSecret bounds a file with a certificate, a key or a password, in bytes.
const maxSecret = 1 << 20

// openEtcd returns the store of --etcd.
func openEtcd(c *cli.Context, _ *slog.Logger) (store, error) {
	cfg := etcd.Config{Prefix: c.String("etcd-prefix")}
	for _, endpoint := range strings.Split(c.String("etcd"), ",") {
		endpoint = strings.TrimSpace(endpoint)
		if _, port, err := net.SplitHostPort(endpoint); err != nil || port == "" {
			return nil, fmt.Errorf("--etcd=%s: %q is not HOST:PORT; write etcd-0:2379,etcd-1:2379", c.String("etcd"), endpoint)
		}
		cfg.Endpoints = append(cfg.Endpoints, endpoint)
	}
	if !strings.HasPrefix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("--etcd-prefix=%s: need a key that begins with a slash, such as /dlrover", cfg.Prefix)
	}
	option := func(name string) setting { return setting{"--" + name, c.String(name)} }
	a := access{ca: option("etcd-ca"), cert: option("etcd-cert"), key: option("etcd-key"), user: option("etcd-user"),
		password: option("etcd-password-file")}
	a.encrypted = a.ca.value != "" || a.cert.value != ""
	if err := a.apply(&cfg); err != nil {
		return nil, err
	}
	return etcd.Open(cfg)
}

// setting is a value of the user, and its name in errors.
type setting struct{ name, value string }

// read returns the content of the file that the value names.
func (s setting) read() ([]byte, error) {
	data, err := openfile.ReadNamed(s.value, maxSecret)
	if err != nil {
		return nil, s.wrong(err)
	}
	return data, nil
}

func (s setting) wrong(err error) error { return fmt.Errorf("%s=%s: %w", s.name, s.value, err) }

// access is how to get into an etcd; all but the user are paths.
type access struct {
	encrypted      bool
	ca, cert, key  setting
	user, password setting
}

func (a *access) apply(cfg *etcd.Config) (err error) {
	for _, pair := range [][2]setting{{a.cert, a.key}, {a.user, a.password}} {
		if (pair[0].value == "") != (pair[1].value == "") {
			return fmt.Errorf("%s and %s belong together: give both or none", pair[0].name, pair[1].name)
		}
	}
	if a.encrypted {
		if cfg.TLS, err = a.encryption(); err != nil {
			return err
		}
	}
	if cfg.User = a.user.value; cfg.User != "" {
		var data []byte
		data, err = a.password.read()
		cfg.Password = strings.TrimRight(string(data), "\r\n")
	}
	return err
}

func (a *access) encryption() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if a.ca.value != "" {
		pem, err := a.ca.read()
		if err != nil {
			return nil, err
		}
		if cfg.RootCAs = x509.NewCertPool(); !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, a.ca.wrong(errors.New("it has no certificate in PEM"))
		}
	}
	if a.cert.value == "" {
		return cfg, nil
	}
	cert, err := a.cert.read()
	if err != nil {
		return nil, err
	}
	key, err := a.key.read()
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s=%s and %s=%s: %w", a.cert.name, a.cert.value, a.key.name, a.key.value, err)
	}
	cfg.Certificates = []tls.Certificate{pair}
	return cfg, nil
}
