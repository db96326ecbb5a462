package master

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
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
func openEtcd(c *cli.Context) (store, error) {
	cfg := etcd.Config{Prefix: c.String("etcd-prefix"), User: c.String("etcd-user")}
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
	var err error
	if cfg.TLS, err = encryption(c); err != nil {
		return nil, err
	}
	if cfg.Password, err = password(c); err != nil {
		return nil, err
	}
	return etcd.Open(cfg)
}

func encryption(c *cli.Context) (*tls.Config, error) {
	ca, cert, key := c.String("etcd-ca"), c.String("etcd-cert"), c.String("etcd-key")
	if (cert == "") != (key == "") {
		return nil, errors.New("--etcd-cert and --etcd-key belong together: give both or none")
	}
	if ca == "" && cert == "" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := openfile.ReadNamed(ca, maxSecret)
		if err != nil {
			return nil, fmt.Errorf("--etcd-ca=%s: %w", ca, err)
		}
		if cfg.RootCAs = x509.NewCertPool(); !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--etcd-ca=%s: it has no certificate in PEM", ca)
		}
	}
	if cert == "" {
		return cfg, nil
	}
	certPEM, err := openfile.ReadNamed(cert, maxSecret)
	if err != nil {
		return nil, fmt.Errorf("--etcd-cert=%s: %w", cert, err)
	}
	keyPEM, err := openfile.ReadNamed(key, maxSecret)
	if err != nil {
		return nil, fmt.Errorf("--etcd-key=%s: %w", key, err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("--etcd-cert=%s and --etcd-key=%s: %w", cert, key, err)
	}
	cfg.Certificates = []tls.Certificate{pair}
	return cfg, nil
}

func password(c *cli.Context) (string, error) {
	user, path := c.String("etcd-user"), c.String("etcd-password-file")
	if (user == "") != (path == "") {
		return "", errors.New("--etcd-user and --etcd-password-file belong together: give both or none")
	}
	if path == "" {
		return "", nil
	}
	data, err := openfile.ReadNamed(path, maxSecret)
	if err != nil {
		return "", fmt.Errorf("--etcd-password-file=%s: %w", path, err)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}
