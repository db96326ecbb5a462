package elector

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/member"
)

func none(string) string { return "" }

// Every key of both of torchrun's backends has its effect, and is not left for others.
func TestRead(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		return path
	}
	ca, cert, key, password := file("ca"), file("cert"), file("key"), file("password")
	want := member.Etcd{Endpoints: []string{"e:2379"}, Prefix: "/p", HTTPS: true, CA: ca, Cert: cert, Key: key, User: "u",
		PasswordFile: password}
	for _, names := range [][3]string{{"ca_cert", "ssl_cert", "ssl_cert_key"}, {"cacert", "cert", "key"}} {
		conf := map[string]string{"protocol": "https", "etcd_prefix": "/p", "user": "u", "password_file": password,
			"read_timeout": "5", names[0]: ca, names[1]: cert, names[2]: key}
		got, err := Read(conf, []string{"e:2379"}, none)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, map[string]string{"read_timeout": "5"}, conf)
	}
	got, err := Read(map[string]string{"protocol": "https", "cert": cert}, nil, func(name string) string {
		return map[string]string{"DLROVER_ETCD_USER": "v", "DLROVER_ETCD_PASSWORD_FILE": password}[name]
	})
	require.NoError(t, err)
	require.Equal(t, member.Etcd{Prefix: "/dlrover/runs", HTTPS: true, Cert: cert, Key: cert, User: "v",
		PasswordFile: password}, got, "one file may have both")
}

func TestReadRefuses(t *testing.T) {
	there := t.TempDir()
	for want, conf := range map[string]map[string]string{
		"need http or https":           {"protocol": "etcd"},
		"begins with a slash":          {"etcd_prefix": "p"},
		"add protocol=https":           {"cert": there, "key": there},
		"needs ssl_cert":               {"protocol": "https", "ssl_cert_key": there},
		"are the same setting":         {"protocol": "https", "cert": "a", "ssl_cert": "b"},
		"a user of etcd needs a passw": {"user": "u"},
		"no such file":                 {"protocol": "https", "ca_cert": there + "/missing"},
	} {
		_, err := Read(conf, nil, none)
		require.ErrorContains(t, err, want)
	}
}

func TestFind(t *testing.T) {
	own, err := os.Executable()
	require.NoError(t, err)
	beside := filepath.Join(filepath.Dir(own), "dlrover-master")
	found := map[string]string{beside: beside, "dlrover-master": "/usr/bin/dlrover-master"}
	look := func(file string) (string, error) {
		if path, ok := found[file]; ok {
			return path, nil
		}
		return "", errors.New("not there")
	}
	path, err := Find("--ui", look)
	require.NoError(t, err)
	require.Equal(t, beside, path)
	delete(found, beside)
	path, err = Find("--ui", look)
	require.NoError(t, err)
	require.Equal(t, "/usr/bin/dlrover-master", path)
	clear(found)
	_, err = Find("--ui", look)
	require.ErrorContains(t, err, "neither in "+filepath.Dir(own)+" nor in PATH")
}
